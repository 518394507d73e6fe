#include "tessera/reshard/job_state.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "base/digest.h"
#include "formats/pieces_with_elements.h"
#include "reshard/in_memory_writer.h"
#include "reshard/optimizer_rules.h"
#include "reshard/writer_balance.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::Piece;
using formats::TensorEntry;

constexpr std::int64_t kJobBlockNbytes = std::int64_t{4} << 20;

/// Returns the regions of a tensor, each with its ranks. An empty tensor gets one empty shard, on
/// one of the ranks that have it.
std::vector<Shard> shards_of(const JobTensor& tensor, int world_size) {
  if (numel_of(tensor.meta.shape) == 0) {
    const bool has_ranks = !tensor.layout.empty() && !tensor.layout.front().ranks.empty();
    return {{whole_box(tensor.meta.shape), {has_ranks ? tensor.layout.front().ranks.front() : 0}}};
  }
  if (!tensor.layout.empty()) return tensor.layout;
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  return {{whole_box(tensor.meta.shape), std::move(all)}};
}

TensorEntry entry_of(const JobTensor& tensor, int world_size, bool boxes_only,
                     WriterBalance& balance) {
  TensorEntry entry;
  entry.meta = tensor.meta;
  entry.kind = tensor.kind;
  entry.parameter = tensor.parameter;
  entry.key_path = tensor.key_path;
  for (const Shard& shard : shards_of(tensor, world_size)) {
    const int rank = balance.choose(shard.ranks, nbytes_of(shard.region, tensor.meta.dtype));
    if (!boxes_only || numel_of(tensor.meta.shape) == 0) {
      entry.pieces.push_back({shard.region, rank});
      continue;
    }
    for (Box& box : boxes_of(shard.region, tensor.meta.shape)) {
      entry.pieces.push_back({std::move(box), rank});
    }
  }
  std::ranges::sort(entry.pieces.edit(), {}, [](const Piece& piece) { return piece.region; });
  return entry;
}

void set_kinds_by_name(const std::vector<std::string>& value_names, CheckpointContents& contents) {
  for (const std::string& name : value_names) contents.values.push_back({.name = name});
  const std::vector<StateRole> roles = classify_state(contents);
  contents.values.clear();
  for (std::size_t t = 0; t < roles.size(); ++t) {
    contents.tensors[t].kind = roles[t].kind;
    if (const auto parameter = roles[t].parameter_index) {
      contents.tensors[t].parameter = contents.tensors[*parameter].meta.fqn;
    }
  }
}

/// Gives a writer the pieces of this rank, from the memory of its tensors.
class MemorySource final : public formats::TensorSource {
 public:
  MemorySource(CheckpointContents contents, std::vector<std::vector<const std::byte*>> data)
      : contents_(std::move(contents)), data_(std::move(data)) {}

  const CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const std::size_t size = itemsize(contents_.tensors[tensor_index].meta.dtype);
    const std::byte* const from =
        data_[tensor_index][piece_index] + static_cast<std::size_t>(range.begin) * size;
    std::memcpy(out.data(), from, out.size());
  }

 private:
  CheckpointContents contents_;
  std::vector<std::vector<const std::byte*>> data_;
};

/// Copies the pieces that a move reads into the tensors of this rank.
class MemoryWriter final : public InMemoryWriter {
 public:
  MemoryWriter(CheckpointContents contents, std::vector<std::vector<std::byte*>> data)
      : contents_(std::move(contents)),
        data_(std::move(data)),
        order_(formats::pieces_with_elements(contents_)) {}

  const CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override {
    return kJobBlockNbytes / static_cast<std::int64_t>(size_of(piece));
  }
  std::span<std::byte> memory_of(PieceId piece, FlatRange window) override {
    return {data_[piece.tensor_index][piece.piece_index] +
                static_cast<std::size_t>(window.begin) * size_of(piece),
            static_cast<std::size_t>(window.numel()) * size_of(piece)};
  }
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override {
    const auto numel = static_cast<std::int64_t>(bytes.size() / size_of(piece));
    std::memcpy(memory_of(piece, {begin, begin + numel}).data(), bytes.data(), bytes.size());
  }
  void abandon() noexcept override {}
  void commit() override {}

 private:
  std::size_t size_of(PieceId piece) const {
    return itemsize(contents_.tensors[piece.tensor_index].meta.dtype);
  }

  CheckpointContents contents_;
  std::vector<std::vector<std::byte*>> data_;
  std::vector<PieceId> order_;
};

}  // namespace

CheckpointContents share_out(const JobState& state, const formats::FormatTraits& traits) {
  const bool boxes_only = traits.pieces == formats::FormatTraits::Pieces::boxes;
  CheckpointContents contents;
  contents.world_size = state.world_size;
  std::map<std::string_view, const JobTensor*> by_name;
  for (const JobTensor& tensor : state.tensors) by_name.emplace(tensor.meta.fqn, &tensor);
  std::vector<JobTensor> copies;  // of tied tensors, which have several names
  if (traits.holds_aliases) {
    contents.aliases = state.aliases;
    std::ranges::sort(contents.aliases, {}, &formats::Alias::fqn);
  } else {
    copies.reserve(state.aliases.size());
    for (const formats::Alias& alias : state.aliases) {
      copies.push_back(*by_name.at(alias.target));
      copies.back().meta.fqn = alias.fqn;
      copies.back().key_path = alias.key_path;
    }
    for (const JobTensor& copy : copies) by_name.emplace(copy.meta.fqn, &copy);
  }
  WriterBalance balance(state.world_size);
  for (const auto& [name, tensor] : by_name) {
    contents.tensors.push_back(entry_of(*tensor, state.world_size, boxes_only, balance));
  }
  if (traits.holds_flat_units) contents.units = state.units;
  if (state.has_kinds_by_name) set_kinds_by_name(state.value_names, contents);
  return contents;
}

std::string layout_digest(const JobState& state, formats::Format format) {
  Sha256 hash;
  const auto add = [&](std::string_view text) {
    hash.update(std::as_bytes(std::span(text)));
    hash.update(std::as_bytes(std::span("\n", 1)));
  };
  add(std::to_string(state.world_size) + " " + std::string(format.name()));
  const auto add_name = [&](const std::string& fqn, const formats::KeyPath& path) {
    std::string kinds;  // of the keys: the name spells the keys 0 and "0" alike
    for (const formats::Key& key : path) kinds += "sin"[key.index()];
    add(fqn + " " + kinds);
  };
  for (const JobTensor& tensor : state.tensors) {
    add_name(tensor.meta.fqn, tensor.key_path);
    add(dtype_name(tensor.meta.dtype));
    add(shape_to_string(tensor.meta.shape));
    add(formats::state_kind_name(tensor.kind));
    add(tensor.parameter);
    for (const Shard& shard : tensor.layout) {
      add(region_to_string(shard.region));
      for (const int rank : shard.ranks) add(std::to_string(rank));
    }
  }
  for (const formats::Alias& alias : state.aliases) {
    add_name(alias.fqn, alias.key_path);
    add("= " + alias.target);
  }
  return hash.hex_digest();
}

CheckpointContents held_contents(const CheckpointContents& contents,
                                 const std::vector<std::vector<Region>>& held, int rank) {
  CheckpointContents of_rank = contents;
  for (std::size_t t = 0; t < of_rank.tensors.size(); ++t) {
    of_rank.tensors[t].pieces.clear();
    for (const Region& region : held[t]) of_rank.tensors[t].pieces.push_back({region, rank});
  }
  return of_rank;
}

Plan plan_save(const CheckpointContents& contents, const std::vector<std::vector<Region>>& held,
               int rank) {
  Plan plan;
  plan.destination = contents;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    TensorCopy& copy = plan.copies.emplace_back();
    copy.source_tensor = t;
    for (const Piece& piece : tensor.pieces) {
      std::vector<std::uint32_t>& sources = copy.source_pieces.emplace_back();
      if (piece.rank != rank || numel_of(piece.region) == 0) continue;
      for (std::size_t i = 0; i < held[t].size() && sources.empty(); ++i) {
        const CopyRuns runs(tensor.meta.shape, held[t][i], piece.region);
        if (runs.numel() == numel_of(piece.region)) {
          sources.push_back(static_cast<std::uint32_t>(i));
        }
      }
      if (sources.empty()) {
        throw Error::expected(ErrorKind::mismatch, {.fqn = tensor.meta.fqn}, "state of this rank",
                              "a tensor or shard that contains " + region_to_string(piece.region),
                              "none that contains all of it");
      }
      plan.nbytes_to_write += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
  return plan;
}

std::unique_ptr<formats::TensorSource> memory_source(
    CheckpointContents contents, std::vector<std::vector<const std::byte*>> data) {
  return std::make_unique<MemorySource>(std::move(contents), std::move(data));
}

std::unique_ptr<formats::CheckpointWriter> memory_writer(
    CheckpointContents contents, std::vector<std::vector<std::byte*>> data) {
  return std::make_unique<MemoryWriter>(std::move(contents), std::move(data));
}

}  // namespace tessera::reshard
