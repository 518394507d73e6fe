#include "formats/deepspeed/tensor_cuts.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/checked_math.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal_members.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

using tessera::detail::PythonRegex;
using Path = std::vector<std::string>;

constexpr std::string_view kPatternRule = "pattern of names";

const std::string kInfo = kUniversalCheckpointInfo;
const std::string kSubParams = "parameter_with_sub_params";
const std::string kWidths = "sub_param_shard_widths";
constexpr double kVersionWithWidths = 0.4;
constexpr double kNewestVersion = 0.4;
constexpr std::int64_t kAffineMapVersion = 1;

Path extended(Path path, const Path& keys) {
  path.insert(path.end(), keys.begin(), keys.end());
  return path;
}

/// Returns the items of a list or tuple; nothing for anything else.
std::optional<Value::List> items_of(const Value& value) {
  if (const auto* const list = value.get_if<Value::List>()) return *list;
  if (const auto* const tuple = value.get_if<Value::Tuple>()) return tuple->items;
  return std::nullopt;
}

/// Returns a list or tuple of numbers >= 0 as sizes; nothing for anything else.
std::optional<Shape> whole_numbers(const Value& value) {
  const auto items = items_of(value);
  if (!items) return std::nullopt;
  Shape numbers;
  for (const Value& item : *items) {
    const auto* const number = item.get_if<std::int64_t>();
    if (number == nullptr || *number < 0) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

std::optional<std::int64_t> sum_of(const Shape& numbers) {
  std::int64_t sum = 0;
  for (const std::int64_t number : numbers) {
    const auto next = checked_add(sum, number);
    if (!next) return std::nullopt;
    sum = *next;
  }
  return sum;
}

}  // namespace

Error TensorCuts::no_rules(const File& model, const std::string& name) {
  return Error::expected(
      ErrorKind::unsupported, {.path = model.reader().path(), .fqn = name}, "tensor parallelism",
      "'" + kInfo + "', which says how each parameter is cut", "none",
      "DeepSpeed's AutoTP and Megatron-DeepSpeed save it; else write these rules into " +
          std::string(kRulesFile) + " beside this file");
}

TensorCuts::TensorCuts(const FileSystem& fs, const std::string& folder, const File& model)
    : rules_(fs, folder, model) {
  if (rules_.empty()) throw no_rules(model, {});
  read_version();
  if (const auto affine = rules_.value_at({"affine_map", "version"})) {
    const auto* const number = affine->get_if<std::int64_t>();
    if (number == nullptr || *number > kAffineMapVersion) {
      refuse({}, "affine_map.version", std::to_string(kAffineMapVersion), value_to_string(*affine));
    }
  }
  vocabulary_size_ = rules_.number_at({"original_vocab_size"});
  replicated_ = patterns_of("tp_replicated_parameter_patterns");
  averaged_ = patterns_of("parameter_to_average_patterns");
  halves_ = patterns_of("parameter_with_2_sub_params_cat_dim_0");
  row_parallel_ = patterns_of("parameter_with_row_parallelism_patterns");
  vocabulary_ = patterns_of("vocabulary_parameter_patterns");
  read_sub_params();
  require_entries({"affine_map"}, "a dict");
  read_keys({"affine_map", "params"}, affine_maps_);
  read_keys({"autotp_unsupported_parameter_patterns"}, unsupported_);
  require_entries({kWidths}, "a dict of patterns");
}

void TensorCuts::read_version() {
  const std::string member = "universal_checkpoint_version";
  const auto value = rules_.value_at({member});
  if (!value) return;
  const auto* const whole = value->get_if<std::int64_t>();
  const auto* const real = value->get_if<double>();
  if (whole != nullptr) version_ = static_cast<double>(*whole);
  if (real != nullptr) version_ = *real;
  if ((whole == nullptr && real == nullptr) || !(version_ <= kNewestVersion)) {
    refuse({}, member, "a number up to 0.4", value_to_string(*value));
  }
}

/// Throws if a member is one value, not a dict or list of entries. Accepts None and empty ones.
void TensorCuts::require_entries(const Path& path, const std::string& expected) const {
  const auto value = rules_.value_at(path);
  if (!value || value->is<Value::None>()) return;
  const auto* const dict = value->get_if<Value::Dict>();
  const auto items = items_of(*value);
  if ((dict != nullptr && dict->empty()) || (items && items->empty())) return;
  refuse({}, path.back(), expected, value_to_string(*value));
}

void TensorCuts::refuse(const std::string& name, const std::string& rule,
                        const std::string& expected, const std::string& found) const {
  throw Error::expected(ErrorKind::unsupported, {.path = rules_.path(), .fqn = name},
                        kInfo + ": " + rule, expected, found);
}

std::vector<std::string> TensorCuts::texts_of(Path path) const {
  std::vector<std::string> texts;
  const auto value = rules_.value_at(path);
  if (!value) {
    if (!rules_.keys_at(path).empty()) refuse({}, path.back(), "patterns of names", "a dict");
    return texts;
  }
  const auto items = items_of(*value);
  for (const Value& item : items ? *items : Value::List{*value}) {
    const auto* const text = item.get_if<std::string>();
    if (text == nullptr) refuse({}, path.back(), "patterns of names", value_to_string(item));
    texts.push_back(*text);
  }
  return texts;
}

PythonRegex TensorCuts::pattern_of(const std::string& text) {
  PythonRegex pattern(text, rules_.path(), kPatternRule);
  all_patterns_.insert(text);
  constexpr std::size_t kMaxNumSteps = 2'000'000;  // about 100 MB of memory
  num_steps_ += pattern.num_steps();
  if (num_steps_ > kMaxNumSteps) {
    refuse({}, "patterns", "regular expressions with at most 2,000,000 characters in all",
           "more (repetitions {m,n} are counted as written out)");
  }
  return pattern;
}

TensorCuts::Patterns TensorCuts::patterns_of(const std::string& member) {
  Patterns patterns;
  for (const std::string& text : texts_of({member})) {
    patterns.push_back(pattern_of(text));
  }
  return patterns;
}

/// Reads the keys of a dict, which are patterns.
void TensorCuts::read_keys(const Path& path, Patterns& patterns) {
  require_entries(path, "a dict of patterns");
  for (const std::string& key : rules_.keys_at(path)) patterns.push_back(pattern_of(key));
}

void TensorCuts::read_sub_params() {
  require_entries({kSubParams}, "a list of dicts");
  for (const std::string& number : rules_.keys_at({kSubParams})) {
    const Path path{kSubParams, number};
    const auto shape = rules_.value_at(extended(path, {"shape"}));
    const auto items = shape ? items_of(*shape) : std::nullopt;
    const auto dimension = rules_.number_at(extended(path, {"partition_dim"}));
    if (!items || !dimension || *dimension < 0 ||
        *dimension >= static_cast<std::int64_t>(items->size())) {
      refuse({}, kSubParams, "a shape, and a partition_dim that is one of its dimensions",
             shape ? value_to_string(*shape) : "none");
    }
    const std::vector<std::string> patterns = texts_of(extended(path, {"patterns"}));
    if (patterns.empty()) refuse({}, kSubParams, "patterns of names", "none");
    for (const std::string& text : patterns) {
      sub_params_.push_back({pattern_of(text), *items, static_cast<std::size_t>(*dimension)});
    }
  }
}

const PythonRegex* TensorCuts::matching(const Patterns& patterns, const std::string& name) const {
  const auto found = std::ranges::find_if(
      patterns, [&](const PythonRegex& pattern) { return pattern.matches(name); });
  if (found == patterns.end()) return nullptr;
  matched_.insert(found->text());
  return &*found;
}

std::vector<std::string> TensorCuts::unused_patterns() const {
  std::vector<std::string> unused;
  for (const std::string& pattern : all_patterns_) {
    if (!matched_.contains(pattern)) unused.push_back(pattern);
  }
  return unused;
}

bool TensorCuts::has_rule(const std::string& name) const {
  const auto names_it = [&](const Patterns* patterns) {
    return matching(*patterns, name) != nullptr;
  };
  return std::ranges::any_of(std::array{&replicated_, &averaged_, &halves_, &row_parallel_,
                                        &vocabulary_, &affine_maps_, &unsupported_},
                             names_it) ||
         std::ranges::any_of(sub_params_,
                             [&](const SubParams& rule) { return rule.pattern.matches(name); });
}

Joint TensorCuts::join(const std::string& name, const std::vector<Shape>& parts) const {
  if (const PythonRegex* const pattern = matching(unsupported_, name)) {
    const auto reason = rules_.value_at({"autotp_unsupported_parameter_patterns", pattern->text()});
    refuse(name, "autotp_unsupported_parameter_patterns", "parts that can be joined",
           reason ? value_to_string(*reason) : "a parameter that cannot");
  }
  Joint joint = joined_by_rule(name, parts);
  if (matching(vocabulary_, name) != nullptr) {
    if (!vocabulary_size_ || *vocabulary_size_ < 0) {
      refuse(name, "original_vocab_size", "the number of rows without padding", "none");
    }
    cut_padding(joint);
  }
  return joint;
}

Joint TensorCuts::joined_by_rule(const std::string& name, const std::vector<Shape>& parts) const {
  if (const PythonRegex* const pattern = matching(affine_maps_, name)) {
    return joined_by_map(name, *pattern, parts);
  }
  const bool is_replicated = matching(replicated_, name) != nullptr;
  if (is_replicated || matching(averaged_, name) != nullptr) {
    for (const Shape& part : parts) {
      if (part == parts.front()) continue;
      refuse(name, "parts of tensor ranks", shape_to_string(parts.front()) + " on all ranks",
             shape_to_string(part));
    }
    Joint joint{is_replicated ? Joint::Kind::replicated : Joint::Kind::averaged, parts.front(),
                parts, std::vector<std::vector<Block>>(parts.size())};
    const Box all = whole_box(joint.whole);
    joint.blocks.front().push_back({all, all});
    return joint;
  }
  const auto widths_along = [&](std::size_t dimension, bool has_halves) {
    Widths widths(has_halves ? 2 : 1);
    for (const Shape& part : parts) {
      const std::int64_t size = dimension < part.size() ? part[dimension] : 0;
      const std::int64_t first = has_halves ? ceil_div<std::int64_t>(size, 2) : size;
      widths.front().push_back(first);
      if (has_halves) widths.back().push_back(size - first);
    }
    return widths;
  };
  if (matching(halves_, name) != nullptr) {
    return joined_by_widths(name, parts, 0, widths_along(0, true));
  }
  const auto rule = std::ranges::find_if(
      sub_params_, [&](const SubParams& each) { return each.pattern.matches(name); });
  if (rule != sub_params_.end()) {
    matched_.insert(rule->pattern.text());
    return joined_sub_params(name, *rule, parts);
  }
  const std::size_t dimension = matching(row_parallel_, name) != nullptr ? 1 : 0;
  return joined_by_widths(name, parts, dimension, widths_along(dimension, false));
}

Joint TensorCuts::joined_by_widths(const std::string& name, std::vector<Shape> parts,
                                   std::size_t dimension, const Widths& widths) const {
  for (const Shape& part : parts) {
    Shape expected = parts.front();
    if (dimension < expected.size() && dimension < part.size()) {
      expected[dimension] = part[dimension];
    }
    if (part == expected && dimension < part.size()) continue;
    refuse(name, "parts of tensor ranks",
           "shapes that differ only in dimension " + std::to_string(dimension),
           shape_to_string(parts.front()) + " and " + shape_to_string(part));
  }
  Joint joint{.whole = parts.front(), .blocks = std::vector<std::vector<Block>>(parts.size())};
  std::int64_t end = 0;
  Shape ends_in_parts(parts.size(), 0);
  for (const Shape& of_ranks : widths) {
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      Box in_part{Shape(parts[rank].size(), 0), parts[rank]};
      in_part.offsets[dimension] = ends_in_parts[rank];
      in_part.sizes[dimension] = of_ranks[rank];
      Box in_whole = in_part;
      in_whole.offsets[dimension] = end;
      ends_in_parts[rank] += of_ranks[rank];
      const auto next = checked_add(end, of_ranks[rank]);
      if (!next) refuse(name, "parts of tensor ranks", "fewer than 2^63 elements", "more");
      end = *next;
      if (in_part.numel() > 0) joint.blocks[rank].push_back({in_whole, in_part});
    }
  }
  joint.whole[dimension] = end;
  if (!checked_numel(joint.whole)) {
    refuse(name, "parts of tensor ranks", "fewer than 2^63 elements", "more");
  }
  joint.parts = std::move(parts);
  return joint;
}

/// Returns, for each of the parameters that are fused in parameter `name`, its size on each rank.
TensorCuts::Widths TensorCuts::widths_of(const std::string& name, const SubParams& rule,
                                         const std::vector<Shape>& parts) const {
  const Value& spec = rule.shape[rule.dimension];
  auto sizes = whole_numbers(spec);
  const auto ranks = static_cast<std::int64_t>(parts.size());
  if (version_ >= kVersionWithWidths) {
    const auto value = rules_.value_at({kWidths, rule.pattern.text()});
    const auto lists = value ? items_of(*value) : std::nullopt;
    Widths widths;
    for (const Value& list : lists ? *lists : Value::List()) {
      const auto of_ranks = whole_numbers(list);
      const bool is_sum = of_ranks && sizes && widths.size() < sizes->size() &&
                          of_ranks->size() == parts.size() &&
                          sum_of(*of_ranks) == (*sizes)[widths.size()];
      if (!is_sum) {
        refuse(name, kWidths, "sizes of all ranks that add up to " + value_to_string(spec),
               value_to_string(*value));
      }
      widths.push_back(*of_ranks);
    }
    if (sizes && widths.size() == sizes->size()) return widths;
    refuse(name, kWidths, "sizes for " + value_to_string(spec),
           value ? value_to_string(*value) : "none");
  }
  if (const auto* const number = spec.get_if<std::int64_t>(); number != nullptr && *number > 0) {
    std::int64_t all = 0;
    for (const Shape& part : parts) {
      const bool has_dimension = rule.dimension < part.size();
      all = has_dimension ? checked_add(all, part[rule.dimension]).value_or(0) : 0;
    }
    if (all % *number == 0 && *number <= all) {
      sizes = Shape(static_cast<std::size_t>(*number), all / *number);
    }
  }
  const auto is_uneven = [&](std::int64_t size) { return size % ranks != 0; };
  if (!sizes || std::ranges::any_of(*sizes, is_uneven)) {
    refuse(
        name, kSubParams,
        "sizes that are multiples of " + std::to_string(ranks) + " (tensor ranks), or " + kWidths,
        value_to_string(spec));
  }
  Widths widths;
  for (const std::int64_t size : *sizes) widths.emplace_back(parts.size(), size / ranks);
  return widths;
}

Joint TensorCuts::joined_sub_params(const std::string& name, const SubParams& rule,
                                    const std::vector<Shape>& parts) const {
  const Widths widths = widths_of(name, rule, parts);
  std::vector<Shape> seen_as;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const std::int64_t numel = numel_of(parts[rank]);
    Shape shape;
    std::optional<std::size_t> open;  // the dimension given as -1, computed from the numel
    for (std::size_t i = 0; i < rule.shape.size(); ++i) {
      const Value& spec = rule.shape[i];
      const auto* const number = spec.get_if<std::int64_t>();
      const auto numbers = whole_numbers(spec);
      std::int64_t size = number != nullptr ? *number
                          : numbers         ? sum_of(*numbers).value_or(-2)
                                            : -2;
      if (i == rule.dimension) {
        size = 0;
        for (const Shape& of_ranks : widths) size = checked_add(size, of_ranks[rank]).value_or(-2);
      } else if (size == -1 && !open) {
        open = i;
        size = 1;
      }
      shape.push_back(size);
    }
    const auto known = checked_numel(shape);
    const bool fits = known && (open ? *known > 0 && numel % *known == 0 : *known == numel);
    if (!fits) {
      refuse(name, kSubParams, "a shape of " + std::to_string(numel) + " elements",
             value_to_string(Value(rule.shape)));
    }
    if (open) shape[*open] = numel / *known;
    seen_as.push_back(std::move(shape));
  }
  return joined_by_widths(name, std::move(seen_as), rule.dimension, widths);
}

Shape TensorCuts::shape_at(const std::string& name, const Path& path) const {
  const auto value = rules_.value_at(path);
  const auto shape = value ? whole_numbers(*value) : std::nullopt;
  if (!shape || !checked_numel(*shape)) {
    refuse(name, "affine_map", path.back(), value ? value_to_string(*value) : "none");
  }
  return *shape;
}

/// Returns the box in a tensor of `shape` that a piece of an affine map covers. `side`: "source"
/// (the whole parameter) or "dest" (a rank's part).
Box TensorCuts::box_at(const std::string& name, const Path& piece, const std::string& side,
                       const Shape& sizes, const Shape& shape) const {
  const auto value = rules_.value_at(extended(piece, {side}));
  const auto items = value ? items_of(*value) : std::nullopt;
  const auto strides = items && items->size() == 2 ? whole_numbers((*items)[1]) : std::nullopt;
  const auto* const first = strides ? (*items)[0].get_if<std::int64_t>() : nullptr;
  Box box{Shape(shape.size(), 0), sizes};
  bool is_box = first != nullptr && *first >= 0 && sizes.size() == shape.size() &&
                strides->size() == shape.size() && numel_of(shape) > 0;
  std::int64_t stride = 1;
  std::int64_t left = first != nullptr ? *first : 0;
  for (std::size_t i = shape.size(); is_box && i-- > 0;) {
    is_box = sizes[i] <= 1 || (*strides)[i] == stride;
    stride *= shape[i];
  }
  for (std::size_t i = 0; is_box && i < shape.size(); ++i) {
    stride = shape[i] == 0 ? 1 : stride / shape[i];
    box.offsets[i] = stride == 0 ? 0 : left / stride;
    left -= box.offsets[i] * stride;
  }
  if (is_box && left == 0 && !region_error(box, shape)) return box;
  refuse(name, "affine_map", "pieces that are boxes of " + shape_to_string(shape),
         value ? value_to_string(*value) : "none");
}

Joint TensorCuts::joined_by_map(const std::string& name, const PythonRegex& pattern,
                                const std::vector<Shape>& parts) const {
  const Path path{"affine_map", "params", pattern.text()};
  Joint joint{.whole = shape_at(name, extended(path, {"logical_shape"})),
              .blocks = std::vector<std::vector<Block>>(parts.size())};
  std::set<Box> known;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const Path of_rank = extended(path, {"ranks", std::to_string(rank)});
    const Shape part = shape_at(name, extended(of_rank, {"shard_shape"}));
    if (numel_of(part) != numel_of(parts[rank])) {
      refuse(name, "affine_map", shape_to_string(part), shape_to_string(parts[rank]));
    }
    joint.parts.push_back(part);
    std::int64_t numel = 0;
    for (std::size_t i = 0;; ++i) {
      const Path piece = extended(of_rank, {"pieces", std::to_string(i)});
      if (!rules_.value_at(extended(piece, {"shape"}))) break;
      const auto scale = rules_.value_at(extended(piece, {"scale"}));
      if (scale && *scale != Value(1.0)) {
        refuse(name, "affine_map", "pieces with the scale 1.0", value_to_string(*scale));
      }
      const Shape sizes = shape_at(name, extended(piece, {"shape"}));
      Block block{box_at(name, piece, "source", sizes, joint.whole),
                  box_at(name, piece, "dest", sizes, part)};
      numel += block.in_part.numel();
      if (block.in_part.numel() > 0 && known.insert(block.in_whole).second) {
        joint.blocks[rank].push_back(std::move(block));
      }
    }
    if (numel == numel_of(part)) continue;
    refuse(
        name, "affine_map",
        std::to_string(numel_of(part)) + " elements in the pieces of rank " + std::to_string(rank),
        std::to_string(numel));
  }
  return joint;
}

/// Removes the padding rows from the blocks. They are the rows after the end of the vocabulary.
void TensorCuts::cut_padding(Joint& joint) const {
  if (joint.whole.empty()) return;
  joint.vocabulary_size = vocabulary_size_;
  if (joint.whole[0] <= *vocabulary_size_) return;
  joint.num_padding_rows = joint.whole[0] - *vocabulary_size_;
  joint.whole[0] = *vocabulary_size_;
  for (std::vector<Block>& blocks : joint.blocks) {
    for (Block& block : blocks) {
      const std::int64_t left =
          std::max<std::int64_t>(*vocabulary_size_ - block.in_whole.offsets[0], 0);
      block.in_whole.sizes[0] = std::min(block.in_whole.sizes[0], left);
      block.in_part.sizes[0] = block.in_whole.sizes[0];
    }
    std::erase_if(blocks, [](const Block& block) { return block.in_part.numel() == 0; });
  }
}

}  // namespace tessera::formats::deepspeed
