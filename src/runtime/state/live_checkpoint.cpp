#include "runtime/state/live_checkpoint.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "base/digest.h"
#include "reshard/writer_balance.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

using formats::CheckpointContents;
using formats::Piece;
using formats::TensorEntry;

constexpr std::int64_t kBlockNbytes = std::int64_t{4} << 20;

/// Returns the regions of a tensor, each with its ranks. An empty tensor gets one empty shard.
std::vector<Shard> shards_of_entry(const StateTensor& tensor, int world_size) {
  if (numel_of(tensor.shape) == 0) return {{whole_box(tensor.shape), {0}}};
  if (!tensor.layout.empty()) return tensor.layout;
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  return {{whole_box(tensor.shape), std::move(all)}};
}

const StateTensor* tensor_of(const StateDict& state_dict, const StateDict::Item& item) {
  if (const auto* tensor = std::get_if<StateTensor>(&item.entry)) return tensor;
  const auto* alias = std::get_if<StateAlias>(&item.entry);
  if (alias == nullptr) return nullptr;
  const StateEntry* target = state_dict.find(alias->target);
  TESSERA_CHECK(target != nullptr);
  return std::get_if<StateTensor>(target);
}

/// Returns a range of a local shard's elements, as a view.
at::Tensor elements(const at::Tensor& local, FlatRange range) {
  return local.view({-1}).narrow(0, range.begin, range.numel());
}

}  // namespace

LiveState share_out(const StateDict& state_dict, int world_size,
                    const formats::FormatTraits& traits) {
  const bool boxes_only = traits.pieces == formats::FormatTraits::Pieces::boxes;
  LiveState state;
  state.contents.world_size = world_size;
  std::map<std::string, const StateDict::Item*> tensors;  // sorted by name
  for (const StateDict::Item& item : state_dict) {
    if (std::holds_alternative<StateAlias>(item.entry) && traits.holds_aliases) {
      state.contents.aliases.push_back(
          {item.fqn, std::get<StateAlias>(item.entry).target, item.key_path});
    } else if (tensor_of(state_dict, item) != nullptr) {
      tensors.emplace(item.fqn, &item);
    }
  }
  std::ranges::sort(state.contents.aliases, {}, &formats::Alias::fqn);
  reshard::WriterBalance balance(world_size);
  for (const auto& [fqn, item] : tensors) {
    const StateTensor& tensor = *tensor_of(state_dict, *item);
    TensorEntry& entry = state.contents.tensors.emplace_back();
    entry.meta = {fqn, tensor.dtype, tensor.shape};
    entry.kind = tensor.kind;
    entry.parameter = tensor.parameter;
    entry.key_path = item->key_path;
    for (const Shard& shard : shards_of_entry(tensor, world_size)) {
      const std::uint64_t nbytes = nbytes_of(shard.region, tensor.dtype);
      const int rank = balance.choose(shard.ranks, nbytes);
      if (!boxes_only || numel_of(tensor.shape) == 0) {
        entry.pieces.push_back({shard.region, rank});
        continue;
      }
      for (Box& box : boxes_of(shard.region, tensor.shape)) {
        entry.pieces.push_back({std::move(box), rank});
      }
    }
    std::ranges::sort(entry.pieces, {}, [](const Piece& piece) { return piece.region; });
  }
  state.held = held_by(state_dict, state.contents);
  if (traits.holds_flat_units) state.contents.units = state_dict.units;
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
  Sha256 hash;
  const auto add = [&](std::string_view text) {
    hash.update(std::as_bytes(std::span(text)));
    hash.update(std::as_bytes(std::span("\n", 1)));
  };
  add(std::to_string(world_size) + " " + std::string(format.name()));
  for (const StateDict::Item& item : state_dict) {
    add(item.fqn + " " + std::to_string(item.key_path.size()));
    if (const auto* alias = std::get_if<StateAlias>(&item.entry)) add("= " + alias->target);
    const auto* tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor == nullptr) continue;
    add(dtype_name(tensor->dtype));
    add(shape_to_string(tensor->shape));
    add(formats::state_kind_name(tensor->kind));
    for (const Shard& shard : tensor->layout) {
      add(region_to_string(shard.region));
      for (const int rank : shard.ranks) add(std::to_string(rank));
    }
  }
  return hash.hex_digest();
}

CheckpointContents held_contents(const LiveState& state, int rank) {
  CheckpointContents contents = state.contents;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    contents.tensors[t].pieces.clear();
    for (const LocalShard& local : state.held[t]) {
      contents.tensors[t].pieces.push_back({local.region, rank});
    }
  }
  return contents;
}

reshard::Plan plan_save(const LiveState& state, int rank) {
  reshard::Plan plan;
  plan.destination = state.contents;
  for (std::size_t t = 0; t < state.contents.tensors.size(); ++t) {
    const TensorEntry& tensor = state.contents.tensors[t];
    reshard::TensorCopy& copy = plan.copies.emplace_back();
    copy.source_tensor = t;
    for (const Piece& piece : tensor.pieces) {
      std::vector<std::uint32_t>& sources = copy.source_pieces.emplace_back();
      if (piece.rank != rank || numel_of(piece.region) == 0) continue;
      for (std::size_t i = 0; i < state.held[t].size() && sources.empty(); ++i) {
        const CopyRuns runs(tensor.meta.shape, state.held[t][i].region, piece.region);
        if (runs.numel() == numel_of(piece.region)) {
          sources.push_back(static_cast<std::uint32_t>(i));
        }
      }
      if (sources.empty()) {
        throw Error::expected(ErrorKind::mismatch, {.fqn = tensor.meta.fqn}, "state of this rank",
                              region_to_string(piece.region), "none of it");
      }
      plan.nbytes_to_write += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
  return plan;
}

void LiveSource::read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                            std::span<std::byte> out) const {
  const at::NoGradGuard no_grad;
  const at::Tensor from = elements(held_[tensor_index][piece_index].tensor, range).to(at::kCPU);
  std::memcpy(out.data(), from.data_ptr(), out.size());
}

std::vector<formats::CheckpointWriter::PieceId> LiveWriter::write_order() const {
  std::vector<PieceId> order;
  for (std::size_t t = 0; t < contents_.tensors.size(); ++t) {
    for (std::size_t p = 0; p < contents_.tensors[t].pieces.size(); ++p) {
      if (numel_of(contents_.tensors[t].pieces[p].region) > 0) order.push_back({t, p});
    }
  }
  return order;
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
