#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/python_regex.h"
#include "formats/deepspeed/files.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/layout/region.h"

namespace tessera::formats::deepspeed {

/// The member of model states that says how tensor parallelism cut the parameters.
inline constexpr const char* kUniversalCheckpointInfo = "universal_checkpoint_info";

/// Elements of a whole tensor that a tensor rank has. Both boxes have the same sizes.
struct Block {
  Box in_whole;
  Box in_part;
};

/// How the tensor ranks' parts of a parameter make the whole.
struct Joint {
  enum class Kind {
    cut,         // each rank has other elements
    replicated,  // each rank has all elements; the blocks are the first rank's
    averaged,    // the mean of the ranks' parts is the whole; the blocks are the first rank's
  };
  Kind kind = Kind::cut;
  Shape whole{};
  /// The shapes in which blocks have boxes, with as many elements as the ranks' parts.
  std::vector<Shape> parts{};
  std::vector<std::vector<Block>> blocks{};  // by tensor rank
  std::int64_t num_padding_rows = 0;         // of a vocabulary; no block has them
};

/// The rules of `universal_checkpoint_info`. Source: merge_tp_slices in
/// deepspeed/checkpoint/ds_to_universal.py and checkpoint/affine.py, 0.19.
class TensorCuts {
 public:
  /// `model`: model states of one rank; must outlive this. Throws: Error(unsupported) if they do
  /// not have the rules, or patterns that are not read.
  explicit TensorCuts(const File& model);

  /// Whether a rule names the parameter.
  bool has_rule(const std::string& name) const;
  /// Returns how parts of these shapes, by tensor rank, make the whole parameter. A parameter that
  /// no rule names is cut along its first dimension.
  /// Throws: Error(unsupported) with the name if the parts cannot be joined so.
  Joint join(const std::string& name, const std::vector<Shape>& parts) const;

 private:
  using Patterns = std::vector<tessera::detail::PythonRegex>;
  /// For each parameter inside a parameter: its size in each rank's part, along one dimension.
  using Widths = std::vector<Shape>;
  /// A rule for parameters that hold several parameters one after the other, each of them cut.
  struct SubParams {
    tessera::detail::PythonRegex pattern;
    Value::List shape;
    std::size_t dimension = 0;
  };

  std::vector<std::string> texts_of(std::vector<std::string> path) const;
  tessera::detail::PythonRegex pattern_of(const std::string& text);
  Patterns patterns_of(const std::string& member);
  void read_sub_params();
  void read_keys(const std::vector<std::string>& path, Patterns& patterns);
  [[noreturn]] void refuse(const std::string& name, const std::string& rule,
                           const std::string& expected, const std::string& found) const;

  Joint joined_by_rule(const std::string& name, const std::vector<Shape>& parts) const;
  Joint joined_by_map(const std::string& name, const tessera::detail::PythonRegex& pattern,
                      const std::vector<Shape>& parts) const;
  Box box_at(const std::string& name, const std::vector<std::string>& piece,
             const std::string& side, const Shape& sizes, const Shape& shape) const;
  Shape shape_at(const std::string& name, const std::vector<std::string>& path) const;
  Joint joined_sub_params(const std::string& name, const SubParams& rule,
                          const std::vector<Shape>& parts) const;
  Widths widths_of(const std::string& name, const SubParams& rule,
                   const std::vector<Shape>& parts) const;
  Joint joined_by_widths(const std::string& name, std::vector<Shape> parts, std::size_t dimension,
                         const Widths& widths) const;
  void cut_padding(Joint& joint) const;

  const File& model_;
  double version_ = 0.0;
  std::size_t num_steps_ = 0;  // of all patterns
  Patterns replicated_;
  Patterns averaged_;
  Patterns halves_;
  Patterns row_parallel_;
  Patterns vocabulary_;
  std::vector<SubParams> sub_params_;
  Patterns affine_maps_;
  Patterns unsupported_;
  std::optional<std::int64_t> vocabulary_size_;
};

}  // namespace tessera::formats::deepspeed
