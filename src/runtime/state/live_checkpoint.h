#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/planner.h"
#include "tessera/runtime/registry/state_dict.h"

// A trainer's tensors as a checkpoint in memory, so that saving and loading are moves between two
// checkpoints like any other.

namespace tessera::state {

/// What a state dict of type SHARDED holds, as contents of a checkpoint. Values are not among it.
struct LiveState {
  /// Who is to write what: every piece on one rank, the same on all ranks.
  formats::CheckpointContents contents;
  /// What this rank holds of each tensor, parallel to `contents.tensors`.
  std::vector<std::vector<TensorPart>> held;
};

/// Shares the writing of a state dict out among the ranks, in pieces that the format can hold.
LiveState share_out(const StateDict& state_dict, int world_size,
                    const formats::FormatTraits& traits = {});

/// Returns what this rank holds of the tensors of `contents`, which `share_out` made of a state
/// dict of this layout.
std::vector<std::vector<TensorPart>> held_by(const StateDict& state_dict,
                                             const formats::CheckpointContents& contents);

/// Returns the SHA-256 of what is in a state dict but for the elements, which decides what
/// `share_out` returns.
std::string layout_digest(const StateDict& state_dict, int world_size, formats::Format format);

/// Returns contents whose pieces are what `rank` holds.
formats::CheckpointContents held_contents(const LiveState& state, int rank);

/// Returns a plan that writes what falls to `rank`.
reshard::Plan plan_save(const LiveState& state, int rank);

/// Tensors of this rank. `contents` is `held_contents`, `held` parallel to its tensors.
class LiveSource final : public formats::TensorSource {
 public:
  LiveSource(formats::CheckpointContents contents, std::vector<std::vector<TensorPart>> held)
      : contents_(std::move(contents)), held_(std::move(held)) {}

  const formats::CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;

 private:
  formats::CheckpointContents contents_;
  std::vector<std::vector<TensorPart>> held_;
};

/// Writes tensors of this rank: those of `contents`, piece by piece into `parts`.
class LiveWriter final : public formats::CheckpointWriter {
 public:
  LiveWriter(formats::CheckpointContents contents, std::vector<std::vector<TensorPart>> parts)
      : contents_(std::move(contents)), parts_(std::move(parts)) {}

  const formats::CheckpointContents& contents() const override { return contents_; }
  std::vector<PieceId> write_order() const override;
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  void abandon() noexcept override {}
  void commit() override {}

 private:
  formats::CheckpointContents contents_;
  std::vector<std::vector<TensorPart>> parts_;
};

}  // namespace tessera::state
