#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "formats/pieces_with_elements.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/job_state.h"
#include "tessera/reshard/planner.h"
#include "tessera/runtime/registry/state_dict.h"

// Presents a trainer's tensors as a checkpoint in memory. So a save or a load is a copy from one
// checkpoint to another.

namespace tessera::state {

/// The tensors of a state dict of type SHARDED as checkpoint contents, without values.
struct LiveState {
  /// The tensors, cut into pieces. Each piece names the one rank that writes it. All ranks have the
  /// same `contents`.
  formats::CheckpointContents contents;
  /// This rank's shards of each tensor in `contents.tensors`.
  std::vector<std::vector<LocalShard>> held;
};

/// Cuts a state dict into pieces that the format can hold, and decides which rank writes each.
LiveState share_out(const StateDict& state_dict, int world_size,
                    const formats::FormatTraits& traits = {});

/// Returns this rank's shards of each tensor of `contents`, which `share_out` made from a state
/// dict of the same layout.
std::vector<std::vector<LocalShard>> held_by(const StateDict& state_dict,
                                             const formats::CheckpointContents& contents);

/// Returns a SHA-256 of world size, format, and the tensors and aliases of a state dict, without
/// elements, values and `units`. With equal digests, `share_out` makes equal pieces.
std::string layout_digest(const StateDict& state_dict, int world_size, formats::Format format);

/// Returns the contents of `state`, but its pieces are the regions that this rank, `rank`, holds.
formats::CheckpointContents held_contents(const LiveState& state, int rank);

/// Returns a plan that writes the pieces of this rank, `rank`.
reshard::Plan plan_save(const LiveState& state, int rank);

/// Reads from this rank's tensors, as the source of a save. `contents` is from `held_contents`;
/// `held` has the shards of each of its tensors.
class LiveSource final : public formats::TensorSource {
 public:
  LiveSource(formats::CheckpointContents contents, std::vector<std::vector<LocalShard>> held)
      : contents_(std::move(contents)), held_(std::move(held)) {}

  const formats::CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;

 private:
  formats::CheckpointContents contents_;
  std::vector<std::vector<LocalShard>> held_;
};

/// Writes the pieces of `contents` into this rank's tensors `held`, as the destination of a load.
class LiveWriter final : public formats::CheckpointWriter {
 public:
  LiveWriter(formats::CheckpointContents contents, std::vector<std::vector<LocalShard>> held)
      : contents_(std::move(contents)),
        held_(std::move(held)),
        order_(formats::pieces_with_elements(contents_)) {}

  const formats::CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override { return order_; }
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  void abandon() noexcept override {}
  void commit() override {}

 private:
  formats::CheckpointContents contents_;
  std::vector<std::vector<LocalShard>> held_;
  std::vector<PieceId> order_;
};

}  // namespace tessera::state
