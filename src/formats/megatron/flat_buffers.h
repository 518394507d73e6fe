#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/megatron/optimizer.h"

namespace tessera::formats::megatron {

/// How Megatron puts parameters into a buffer, a flat vector that it divides into buckets.
struct BufferRules {
  std::optional<std::int64_t> bucket_numel{};  // elements of a full bucket; empty: one bucket
  bool has_own_bucket_for_shared = false;      // for embeddings that pipeline stages share
};

/// Returns the offset of each parameter in a flat vector of the distributed optimizer, and as last
/// item the vector's length. `parameters`: in the order of the model. Megatron begins with the last
/// one, which gets offset 0. Each begins at a multiple of 64 in its bucket. Padding after a bucket
/// is not saved. Source: _ParamAndGradBuffer of megatron/core/distributed/param_and_grad_buffer.py
/// and get_parameter_state_dp_zero of megatron/core/optimizer/distrib_optimizer.py, 0.16.
/// Units: elements. Returns nothing if an offset is above 2^60.
std::optional<std::vector<std::int64_t>> places_in_buffer(
    const std::vector<const Parameter*>& parameters, const BufferRules& rules);

/// The flat vectors that one distributed optimizer saved: for each buffer of parameters, a vector
/// of the fp32 weights and one for each kind of state (`exp_avg`, …).
class FlatBuffers {
 public:
  /// `vectors`: the optimizer's file. `root`: the path of the vectors in it. `model`: the rank's
  /// model file, which has the arguments of the run.
  FlatBuffers(const File& vectors, Path root, const File& model);

  bool are_there() const { return !buffers_.empty(); }
  /// Finds the parameters in the vectors, and returns the optimizer's state of each parameter. If
  /// the places of the parameters are not known, `problem()` says why; then ignore the result.
  std::vector<PartState> find(const std::vector<const Parameter*>& parameters);
  const std::string& problem() const { return problem_; }
  /// Whether the problem is the fault of the file, not of an order that Tessera does not know: it
  /// holds other things than vectors, vectors of one buffer have several lengths, or a vector has
  /// the right length, but fp32 weights that differ from the model's.
  bool is_damaged() const { return is_damaged_; }

 private:
  struct Buffer {
    std::map<std::string, const Entry*> vectors{};  // `param`, `exp_avg`, …
    std::int64_t numel = 0;                         // of each vector
  };

  bool check(Buffer& buffer, std::size_t number);
  bool place(const Buffer& buffer, std::size_t number,
             const std::vector<const Parameter*>& parameters, std::vector<PartState>& parts);
  std::vector<BufferRules> possible_rules() const;

  const File& file_;
  const Path root_;
  const File& model_;
  std::map<std::size_t, Buffer> buffers_;  // key: number
  std::string problem_;
  bool is_damaged_ = false;
};

}  // namespace tessera::formats::megatron
