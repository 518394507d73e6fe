#include "runtime/state/live_checkpoint.h"

#include <torch/types.h>

#include <cstring>

#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

using formats::CheckpointContents;
using formats::TensorEntry;

constexpr std::int64_t kBlockNbytes = std::int64_t{4} << 20;

const StateTensor* tensor_of(const StateDict& state_dict, const StateDict::Item& item) {
  if (const auto* tensor = std::get_if<StateTensor>(&item.entry)) return tensor;
  const auto* alias = std::get_if<StateAlias>(&item.entry);
  if (alias == nullptr) return nullptr;
  const StateEntry* target = state_dict.find(alias->target);
  if (target == nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = item.fqn}, "alias in a state dict",
                          "an entry " + alias->target + ", which it is another name of", "none",
                          "has a state dict hook removed or replaced it? one that moves the entry "
                          "unchanged can rename it");
  }
  return std::get_if<StateTensor>(target);
}

reshard::JobState job_state_of(const StateDict& state_dict, int world_size) {
  reshard::JobState state{.world_size = world_size, .units = state_dict.units};
  for (const StateDict::Item& item : state_dict) {
    if (const auto* tensor = std::get_if<StateTensor>(&item.entry)) {
      state.tensors.push_back({.meta = {item.fqn, tensor->dtype, tensor->shape},
                               .key_path = item.key_path,
                               .kind = tensor->kind,
                               .parameter = tensor->parameter,
                               .layout = tensor->layout});
    } else if (const auto* alias = std::get_if<StateAlias>(&item.entry)) {
      if (tensor_of(state_dict, item) == nullptr) continue;
      state.aliases.push_back({item.fqn, alias->target, item.key_path});
    }
  }
  return state;
}

/// Returns the regions that this rank holds of each tensor.
std::vector<std::vector<Region>> held_regions(const LiveState& state) {
  std::vector<std::vector<Region>> regions;
  for (const std::vector<LocalShard>& shards : state.held) {
    std::vector<Region>& of_tensor = regions.emplace_back();
    for (const LocalShard& shard : shards) of_tensor.push_back(shard.region);
  }
  return regions;
}

/// Returns a range of a local shard's elements, as a view.
at::Tensor elements(const at::Tensor& local, FlatRange range) {
  return local.view({-1}).narrow(0, range.begin, range.numel());
}

}  // namespace

LiveState share_out(const StateDict& state_dict, int world_size,
                    const formats::FormatTraits& traits) {
  LiveState state;
  state.contents = reshard::share_out(job_state_of(state_dict, world_size), traits);
  state.held = held_by(state_dict, state.contents);
  return state;
}

std::vector<std::vector<LocalShard>> held_by(const StateDict& state_dict,
                                             const CheckpointContents& contents) {
  std::vector<std::vector<LocalShard>> held;
  for (const TensorEntry& tensor : contents.tensors) {
    const StateEntry* entry = state_dict.find(tensor.meta.fqn);
    TESSERA_CHECK(entry != nullptr);
    if (const auto* alias = std::get_if<StateAlias>(entry)) entry = state_dict.find(alias->target);
    held.push_back(std::get<StateTensor>(*entry).local_shards);
  }
  return held;
}

std::string layout_digest(const StateDict& state_dict, int world_size, formats::Format format) {
  return reshard::layout_digest(job_state_of(state_dict, world_size), format);
}

CheckpointContents held_contents(const LiveState& state, int rank) {
  return reshard::held_contents(state.contents, held_regions(state), rank);
}

reshard::Plan plan_save(const LiveState& state, int rank) {
  return reshard::plan_save(state.contents, held_regions(state), rank);
}

void LiveSource::read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                            std::span<std::byte> out) const {
  const at::NoGradGuard no_grad;
  const at::Tensor from = elements(held_[tensor_index][piece_index].tensor, range).to(at::kCPU);
  std::memcpy(out.data(), from.data_ptr(), out.size());
}

std::int64_t LiveWriter::block_numel(PieceId piece) const {
  return kBlockNbytes /
         static_cast<std::int64_t>(itemsize(contents_.tensors[piece.tensor_index].meta.dtype));
}

void LiveWriter::write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) {
  const at::NoGradGuard no_grad;
  const DType dtype = contents_.tensors[piece.tensor_index].meta.dtype;
  const std::int64_t numel = static_cast<std::int64_t>(bytes.size() / itemsize(dtype));
  at::Tensor to =
      elements(held_[piece.tensor_index][piece.piece_index].tensor, {begin, begin + numel});
  if (to.is_cpu()) {
    std::memcpy(to.data_ptr(), bytes.data(), bytes.size());
    return;
  }
  at::Tensor from = torch::empty({numel}, at::TensorOptions(scalar_type_of(dtype)));
  std::memcpy(from.data_ptr(), bytes.data(), bytes.size());
  to.copy_(from);
}

}  // namespace tessera::state
