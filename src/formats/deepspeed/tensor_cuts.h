#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/python_regex.h"
#include "formats/deepspeed/cut_rules.h"
#include "formats/deepspeed/files.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/layout/region.h"

namespace tessera::formats::deepspeed {

/// Elements of a whole tensor that one tensor rank has: where they are in the whole tensor, and
/// where in the rank's part. Both boxes have the same sizes.
struct Block {
  Box in_whole;
  Box in_part;
};

/// How the tensor ranks' parts of a parameter are joined into the whole parameter.
struct Joint {
  enum class Kind {
    cut,         // the ranks have different elements
    replicated,  // each rank has all elements; the blocks are the first rank's
    averaged,    // the mean of the ranks' parts is the whole; the blocks are the first rank's
  };
  Kind kind = Kind::cut;
  Shape whole{};
  /// By tensor rank: the shape of its part, in which `Block::in_part` is a box. It can differ from
  /// the stored shape, but has the same number of elements.
  std::vector<Shape> parts{};
  std::vector<std::vector<Block>> blocks{};       // by tensor rank
  std::int64_t num_padding_rows = 0;              // rows that pad a vocabulary; no block has them
  std::optional<std::int64_t> vocabulary_size{};  // rows that a vocabulary should have
};

/// The rules in `universal_checkpoint_info` for joining parameters. Source: merge_tp_slices in
/// deepspeed/checkpoint/ds_to_universal.py and checkpoint/affine.py, 0.19.
class TensorCuts {
 public:
  /// `model`: model states of one rank in the folder; must outlive this. Throws: what CutRules
  /// throws; Error(unsupported) if there are no rules, or rules of a form that is not read.
  TensorCuts(const FileSystem& fs, const std::string& folder, const File& model);

  const CutRules& rules() const { return rules_; }
  /// Returns the error for files that do not have the rules. `name`: the parameter, or empty.
  static Error no_rules(const File& model, const std::string& name);

  /// Whether a rule names the parameter.
  bool has_rule(const std::string& name) const;
  /// Returns the patterns that have matched no name so far. `join` and `has_rule` stop at the first
  /// match in a list, so a later pattern that matches the same name stays unused. `has_rule` does
  /// not count its use of patterns of `parameter_with_sub_params`.
  std::vector<std::string> unused_patterns() const;
  /// Returns how parts of these shapes, by tensor rank, make the whole parameter. A parameter that
  /// no rule names is cut along its first dimension.
  /// Throws: Error(unsupported) with the name if the parts cannot be joined in this way.
  Joint join(const std::string& name, const std::vector<Shape>& parts) const;

 private:
  using Patterns = std::vector<tessera::detail::PythonRegex>;
  /// For each of several fused parameters (such as q, k and v in one): its size in each rank's
  /// part, along the dimension that is cut.
  using Widths = std::vector<Shape>;
  /// A rule for a parameter in which several are fused, one after the other (such as q, k and v).
  /// Each of them is cut among the tensor ranks.
  struct SubParams {
    tessera::detail::PythonRegex pattern;
    Value::List shape;
    std::size_t dimension = 0;
  };

  const tessera::detail::PythonRegex* matching(const Patterns& patterns,
                                               const std::string& name) const;
  std::vector<std::string> texts_of(std::vector<std::string> path) const;
  tessera::detail::PythonRegex pattern_of(const std::string& text);
  Patterns patterns_of(const std::string& member);
  void read_version();
  void read_sub_params();
  void require_entries(const std::vector<std::string>& path, const std::string& expected) const;
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

  CutRules rules_;
  double version_ = 0.0;
  std::size_t num_steps_ = 0;  // PythonRegex::num_steps of all patterns, added up
  Patterns replicated_;
  Patterns averaged_;
  Patterns halves_;        // two parameters, fused along dimension 0
  Patterns row_parallel_;  // cut along dimension 1
  Patterns vocabulary_;
  std::vector<SubParams> sub_params_;
  Patterns affine_maps_;
  Patterns unsupported_;  // `join` refuses these
  std::optional<std::int64_t> vocabulary_size_;
  std::set<std::string> all_patterns_;
  mutable std::set<std::string> matched_;  // patterns that matched while opening
};

}  // namespace tessera::formats::deepspeed
