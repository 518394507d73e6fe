#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "arithmetic/lora_adapter.h"
#include "arithmetic/rounding_losses.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/planner.h"

// Weighted sums of checkpoints, with adapters added (docs/combine.md).

namespace tessera::arithmetic {

/// How one source enters the sum: `sum = keep * sum + weight * source`. `keep` has no effect for
/// the first source.
struct Step {
  double keep = 1.0;
  double weight = 1.0;
};

/// The dtype in which sums are computed.
enum class Accumulation { float64, float32 };

/// Whether this dtype can hold a weight: the weight stays finite, and only a weight of 0 becomes 0.
bool can_hold(Accumulation accumulation, double weight);

/// The dtype to which the combined tensors are rounded.
enum class Rounding {
  to_first_source,  // the dtype that the tensor has in the first source
  later,  // the sums stay float64, and the caller casts them; but complex tensors, and those
          // that no cast changes (CastRule), are rounded as by to_first_source
};

/// How to combine.
struct CombineOptions {
  double divisor = 1.0;  // divides the sum, before adapters are added
  Accumulation accumulation = Accumulation::float64;
  Rounding rounding = Rounding::to_first_source;
  /// What to do with sums that are too large for the dtype.
  reshard::OnOverflow on_overflow = reshard::OnOverflow::refuse;
  /// From which source an entry is taken if it is not added up (integers, values, state of the
  /// trainer) and differs between sources. `none`: such a difference is a problem.
  formats::MergePreference preference = formats::MergePreference::none;
  /// Counts, by tensor, the sums that rounding made zero or that were too large. Null: does not
  /// count. A shared_ptr, because the reader adds counts and the caller reads them later.
  std::shared_ptr<RoundingLosses> losses{};
  /// Whether config.json of the result ties the embeddings (says_tied_embeddings).
  bool has_tied_embeddings = false;
  /// Its options `only` and `optimizer` select the names that are combined.
  reshard::PlanOptions selection{};
};

/// A checkpoint to add.
struct WeightedReader {
  std::unique_ptr<formats::CheckpointReader> reader;
  Step step{};
  /// What formats::read_quantization_method returned, unless the weights were dequantized. If it is
  /// not empty, tensors that may be codes or scales are problems too.
  std::string quantization_method{};
};

/// Counts of the tensors of the base model that an adapter changes.
struct AdapterCounts {
  std::string path;
  std::size_t num_changed = 0;   // tensors to which the adapter adds something
  std::size_t num_replaced = 0;  // tensors that the adapter replaces
  std::string added_prefix{};    // what the base's names begin with, and the adapter's do not
  std::string removed_prefix{};  // what the adapter's names begin with, and the base's do not
};

/// What a combination does.
struct CombinationCounts {
  std::size_t num_sources = 0;
  std::size_t num_summed = 0;  // tensors that are added up, or changed by an adapter
  std::size_t num_taken = 0;   // tensors that are taken from one source
  std::vector<AdapterCounts> adapters{};
};

/// The result of a combination.
struct CombinedCheckpoint {
  std::unique_ptr<formats::CheckpointReader> reader;
  std::vector<formats::Finding> problems;  // every reason to refuse the combination, sorted by name
  CombinationCounts counts;                // of the selected tensors
  std::set<DType> widened{};  // dtypes, in the first source, of the tensors that Rounding::later
                              // made float64
};

/// Returns the weighted sum of several checkpoints as one checkpoint, with adapters added. The sum
/// has the names, pieces, ties, annotations and flat units of the first source. The reader adds up
/// elements when they are read, in bounded memory. The result does not depend on how often or in
/// which order they are read. Each number is rounded once.
///
/// Floating-point and complex tensors are added up, except for the state of a trainer (CastRule).
/// Other tensors, and values, are taken from the first or the preferred source. This call reads and
/// compares them: without a preference, each one that differs between sources is a problem. The
/// selected names and their shapes must be equal in all sources, and no optimizer state may be
/// selected. Requires: at least one source.
CombinedCheckpoint combine_checkpoints(std::vector<WeightedReader> sources,
                                       std::vector<LoraAdapter> adapters,
                                       const CombineOptions& options);

}  // namespace tessera::arithmetic
