#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/once.h"
#include "base/value_bits.h"
#include "formats/derived_reader.h"
#include "formats/merged_sources.h"
#include "formats/renamed_units.h"
#include "formats/simplified_values.h"
#include "recipe/element_reader.h"
#include "recipe/losses.h"
#include "recipe/megatron_names.h"
#include "recipe/megatron_rows.h"
#include "recipe/placed_pieces.h"
#include "recipe/rule_matcher.h"
#include "recipe/rules.h"
#include "recipe/state_names.h"
#include "recipe/tile_cache.h"
#include "recipe/transformation.h"
#include "tessera/base/error.h"
#include "tessera/recipe/recipe.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::TensorEntry;

/// Throws an error that lists the first problems, if there are any.
void require_no_problems(const std::vector<Finding>& problems, const std::string& path) {
  constexpr std::size_t kMaxListed = 20;
  if (problems.empty()) return;
  if (problems.size() == 1) throw finding_to_error(problems.front());
  std::string list;
  for (std::size_t i = 0; i < std::min(problems.size(), kMaxListed); ++i) {
    Finding finding = problems[i];
    finding.where.path.clear();
    list += (i == 0 ? "" : "\n") + finding_to_string(finding);
  }
  if (problems.size() > kMaxListed) {
    list += "\nand " + std::to_string(problems.size() - kMaxListed) + " more";
  }
  throw Error::listing(ErrorKind::mismatch, {.path = path},
                       std::to_string(problems.size()) + " problems:", list);
}

/// Throws if the pieces of a source tensor that the recipe needs have holes or overlaps.
void require_whole_sources(const Transformation& transformation, const CheckpointContents& source,
                           const std::string& path) {
  std::set<std::uint32_t> needed;
  for (const Target& target : transformation.targets) {
    for (const Block& block : target.tensor.blocks) needed.insert(block.source);
  }
  needed.erase(kConstant);
  for (const std::uint32_t index : needed) {
    const TensorEntry& tensor = source.tensors[index];
    std::vector<Region> regions;
    for (const formats::Piece& piece : tensor.pieces) regions.push_back(piece.region);
    const auto problems = check_coverage(regions, tensor.meta.shape);
    if (problems.empty()) continue;
    throw Error::expected(ErrorKind::mismatch, {.path = path, .fqn = tensor.meta.fqn}, "recipe",
                          "pieces that cover the tensor once", problems.front().detail);
  }
}

/// Renames parameters in the lists of parameters that an optimizer saves: values such as
/// `optim.param_groups.0.params`.
class GroupNames {
 public:
  GroupNames(const Transformation& transformation, const Wrappers& wrappers)
      : transformation_(transformation), wrappers_(wrappers) {}

  /// The group of each parameter: each group has another number.
  using GroupOf = std::map<std::string, std::size_t>;

  static bool may_list(std::string_view name) {
    return name.find("param_groups") != std::string_view::npos;
  }

  /// Returns a value with the new names of parameters. `key`: its new name; `entry`: its name in
  /// the source. Records the group of each new name in `groups`, if it is not null.
  /// Throws: Error(mismatch) if a name has another group there.
  Value renamed(Value value, std::string_view key, std::string_view entry, GroupOf* groups) const {
    const auto ends_with = [&](std::string_view word) { return key.ends_with(word); };
    auto* list = value.get_if<Value::List>();
    if (list != nullptr && ends_with("param_groups")) {
      for (Value& group : *list) group = renamed_group(std::move(group), entry, groups);
    } else if (list != nullptr && (ends_with(".params") || ends_with(".param_names"))) {
      *list = renamed_list(std::move(*list), entry, ends_with(".params") ? groups : nullptr);
    }
    return value;
  }

 private:
  Value renamed_group(Value group, std::string_view entry, GroupOf* groups) const {
    auto* dict = group.get_if<Value::Dict>();
    if (dict == nullptr) return group;
    for (auto& [key, member] : *dict) {
      const bool is_params = key == Value("params");
      auto* list = member.get_if<Value::List>();
      if (list == nullptr || (!is_params && key != Value("param_names"))) continue;
      *list = renamed_list(std::move(*list), entry, is_params ? groups : nullptr);
    }
    return group;
  }

  Value::List renamed_list(Value::List list, std::string_view entry, GroupOf* groups) const {
    Value::List result;
    std::set<std::string> seen;
    const std::size_t group = groups == nullptr ? 0 : groups->size();
    for (Value& item : list) {
      const auto* name = item.get_if<std::string>();
      const auto& names = transformation_.state_names;
      const auto found =
          name == nullptr || !names ? std::nullopt : names->find_parameter(*name, entry);
      const auto targets = found ? transformation_.targets_of.find(found->name.full_name)
                                 : transformation_.targets_of.end();
      if (targets == transformation_.targets_of.end()) {
        result.push_back(std::move(item));
        continue;
      }
      for (const std::string& target : targets->second) {
        std::string called = optimizer_name_of(target, found->name, wrappers_);
        if (groups != nullptr) note_group(called, group, *groups);
        if (seen.insert(called).second) result.emplace_back(std::move(called));
      }
    }
    return result;
  }

  static void note_group(const std::string& name, std::size_t group, GroupOf& groups) {
    const auto [known, is_new] = groups.emplace(name, group);
    if (is_new || known->second == group) return;
    throw Error::expected(ErrorKind::mismatch, {.fqn = name}, "param_groups",
                          "one parameter group for all parameters that become one tensor",
                          "two groups");
  }

  const Transformation& transformation_;
  Wrappers wrappers_;
};

/// Two tensors that must be equal, because the recipe merges them, or drops one as padding. Checked
/// once, before the target is first read.
struct Condition {
  std::size_t rule;
  IndexedBlocks tensor;
  IndexedBlocks expected;
};

class TransformedReader final : public formats::DerivedReader, public formats::SimplifiedValues {
 public:
  /// `note`: to be shown with the notes of the rules.
  TransformedReader(std::unique_ptr<CheckpointReader> source, const Rules& rules,
                    const std::string& prefix, std::optional<Finding> note = {})
      : DerivedReader(std::move(source)),
        recipe_path_(rules.path),
        made_(transform(rules, base().contents(), whole_tensors_of(base().contents()), prefix,
                        NewNames::collect)),
        elements_(base(), base().path()),
        groups_(made_, rules.wrappers) {
    require_no_problems(made_.problems, rules.path);
    require_whole_sources(made_, base().contents(), base().path());
    losses_ = find_losses(made_, base().contents(), base().path());
    if (note) losses_.insert(losses_.begin(), *std::move(note));
    const auto& values = base().contents().values;
    if (std::ranges::none_of(values, GroupNames::may_list, &formats::ValueEntry::name)) {
      made_.state_names.reset();  // nothing lists parameters
    }
    take_tensors();
    take_conditions();
    contents_.aliases = made_.aliases;
    take_values();
    take_rest();
  }

  std::vector<std::vector<std::string>> dict_orders() const override;
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override;
  std::vector<formats::Simplification> simplifications_of_value(
      std::size_t value_index) const override {
    return formats::simplifications_of_value(base(), made_.values[value_index].sources.front());
  }
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override;
  formats::MissingData find_missing_data() const override;

 private:
  /// Where the elements of a piece come from. `is_permuted`: as ElementReader::is_permuted.
  struct Elements {
    IndexedBlocks blocks;
    bool is_permuted;
  };
  /// A condition that several tensors may share.
  struct SharedCondition {
    Condition condition;
    tessera::detail::Once checked{};
  };

  const std::string& source_name_of(const ValueTarget& value) const {
    return base().contents().values[value.sources.front()].name;
  }
  void take_tensors();
  void take_conditions();
  void take_values();
  void take_rest();
  void check(const Condition& condition, std::size_t tensor_index) const;

  std::string recipe_path_;
  Transformation made_;          // without what was moved to pieces_ and conditions_
  std::vector<Finding> losses_;  // empty after take_rest()
  ElementReader elements_;
  GroupNames groups_;
  /// The elements of each piece: `pieces_[tensor][piece]`.
  std::vector<std::vector<Elements>> pieces_;
  std::multimap<std::size_t, std::shared_ptr<SharedCondition>> conditions_;  // by tensor
  mutable TileCache tiles_;
};

void TransformedReader::take_tensors() {
  for (Target& target : made_.targets) {
    TensorEntry entry = std::move(target.entry);
    std::vector<Elements>& pieces = pieces_.emplace_back();
    for (const Block& block : target.tensor.blocks) {
      if (block.source != kConstant || bytes_of_number(block.added, target.tensor.dtype)) continue;
      throw Error::expected(
          ErrorKind::mismatch, {.path = recipe_path_, .fqn = entry.meta.fqn},
          rule_name(target.rule),
          "a padding value that " + std::string(dtype_name(target.tensor.dtype)) + " can hold",
          std::to_string(block.added));
    }
    for (PlacedPiece& placed : place_pieces(std::move(target.tensor), base().contents())) {
      entry.pieces.push_back(std::move(placed.piece));
      const bool is_permuted = ElementReader::is_permuted(placed.tensor);
      pieces.push_back({IndexedBlocks(std::move(placed.tensor)), is_permuted});
    }
    contents_.tensors.push_back(std::move(entry));
  }
  made_.targets.clear();
}

void TransformedReader::take_conditions() {
  std::map<std::string_view, std::string_view> aliases;
  for (const formats::Alias& alias : made_.aliases) aliases.emplace(alias.fqn, alias.target);
  for (TargetRequirement& each : made_.requirements) {
    const auto condition = std::make_shared<SharedCondition>(
        Condition{each.rule, IndexedBlocks(std::move(each.requirement.tensor)),
                  IndexedBlocks(std::move(each.requirement.expected))});
    for (const std::string_view name : each.targets) {
      const auto alias = aliases.find(name);
      const TensorEntry* target =
          contents_.find_tensor(alias == aliases.end() ? name : alias->second);
      TESSERA_CHECK(target != nullptr);
      conditions_.emplace(target - contents_.tensors.data(), condition);
    }
  }
  made_.requirements.clear();
}

void TransformedReader::take_values() {
  std::map<std::string, GroupNames::GroupOf> groups_of;  // by optimizer
  for (const ValueTarget& value : made_.values) {
    contents_.values.push_back(value.entry);
    const std::string& name = value.entry.name;
    if (GroupNames::may_list(name)) {
      const std::string optimizer = name.substr(0, name.find("param_groups"));
      groups_.renamed(base().read_value(value.sources.front()), name, source_name_of(value),
                      &groups_of[optimizer]);
    }
    for (std::size_t i = 1; i < value.sources.size(); ++i) {
      if (tessera::detail::have_equal_bits(base().read_value(value.sources[i]),
                                           base().read_value(value.sources[0]))) {
        continue;
      }
      const auto& names = base().contents().values;
      throw Error::expected(ErrorKind::mismatch,
                            {.path = base().path(), .fqn = names[value.sources[i]].name}, "recipe",
                            "the value of " + names[value.sources[0]].name +
                                ", because the recipe gives both the name " + value.entry.name,
                            "a different value");
    }
  }
}

void TransformedReader::take_rest() {
  const CheckpointContents& below = base().contents();
  contents_.world_size = below.world_size;
  contents_.annotations = below.annotations;
  contents_.missing_files = below.missing_files;
  contents_.opened_classes = below.opened_classes;
  contents_.part = below.part;
  contents_.opening_findings = below.opening_findings;
  std::ranges::move(losses_, std::back_inserter(contents_.opening_findings));
  contents_.simplifications = renamed_simplifications(made_, below);
  const std::set<std::string_view> dropped(made_.dropped.begin(), made_.dropped.end());
  const auto new_name = [&](const std::string& parameter) -> std::optional<std::string> {
    if (dropped.contains(parameter)) return std::nullopt;
    const auto renamed = made_.new_names.find(parameter);
    if (renamed == made_.new_names.end()) return parameter;
    if (renamed->second.size() != 1) return std::nullopt;
    return renamed->second.front();
  };
  formats::take_units(base(), new_name, contents_);
}

std::vector<std::vector<std::string>> TransformedReader::dict_orders() const {
  std::vector<std::vector<std::string>> orders;
  for (const std::vector<std::string>& order : base().dict_orders()) {
    std::vector<std::string>& names = orders.emplace_back();
    std::set<std::string> seen;
    for (const std::string& name : order) {
      const auto renamed = made_.new_names.find(name);
      if (renamed == made_.new_names.end()) {
        if (contents_.find_tensor(name) != nullptr && seen.insert(name).second)
          names.push_back(name);
        continue;
      }
      for (const std::string& each : renamed->second) {
        if (seen.insert(each).second) names.push_back(each);
      }
    }
  }
  return orders;
}

/// Throws if the two tensors of a condition differ. Uses bounded memory.
void TransformedReader::check(const Condition& condition, std::size_t tensor_index) const {
  constexpr std::uint64_t kWindowNbytes = std::uint64_t{1} << 20;
  const BlockTensor& tensor = condition.tensor.tensor();
  const std::uint64_t size = itemsize(tensor.dtype);
  const std::int64_t numel = numel_of(tensor.shape);
  const auto at_once = static_cast<std::int64_t>(kWindowNbytes / size);
  std::vector<std::byte> found;
  std::vector<std::byte> expected;
  for (std::int64_t at = 0; at < numel; at += at_once) {
    const FlatRange window{at, std::min(at + at_once, numel)};
    found.resize(static_cast<std::size_t>(window.numel()) * size);
    expected.resize(found.size());
    elements_.read(condition.tensor, window, found);
    elements_.read(condition.expected, window, expected);
    if (found == expected) continue;
    const auto differs = std::ranges::mismatch(found, expected).in1 - found.begin();
    throw Error::expected(ErrorKind::mismatch,
                          {.path = path(), .fqn = contents_.tensors[tensor_index].meta.fqn},
                          rule_name(condition.rule),
                          condition.expected.tensor().blocks.front().source == kConstant
                              ? "the recipe's padding value in all elements that are left out"
                              : "equal elements in the tensors that become one",
                          "a different element at position " +
                              std::to_string(at + differs / static_cast<std::int64_t>(size)) +
                              " of " + std::to_string(numel));
  }
}

void TransformedReader::read_piece(std::size_t tensor_index, std::size_t piece_index,
                                   FlatRange range, std::span<std::byte> out) const {
  const auto [begin, end] = conditions_.equal_range(tensor_index);
  for (auto each = begin; each != end; ++each) {
    SharedCondition& shared = *each->second;
    shared.checked.run([&] { check(shared.condition, tensor_index); });
  }
  const Elements& elements = pieces_[tensor_index][piece_index];
  const BlockTensor& tensor = elements.blocks.tensor();
  const std::int64_t numel = numel_of(tensor.shape);
  if (!elements.is_permuted || range.numel() == numel) {
    return elements_.read(elements.blocks, range, out);
  }
  tiles_.read(
      tensor_index, piece_index, numel, itemsize(tensor.dtype), range,
      [&](FlatRange tile, int share, std::span<std::byte> room) {
        elements_.read(elements.blocks, tile, room, {share, TileCache::kNumShares});
      },
      out);
}

Value TransformedReader::read_value(std::size_t value_index) const {
  const ValueTarget& value = made_.values[value_index];
  Value read = base().read_value(value.sources.front());
  if (!GroupNames::may_list(value.entry.name)) return read;
  return groups_.renamed(std::move(read), value.entry.name, source_name_of(value), nullptr);
}

formats::PieceStorage TransformedReader::piece_storage(std::size_t tensor_index,
                                                       std::size_t piece_index) const {
  const BlockTensor& tensor = pieces_[tensor_index][piece_index].blocks.tensor();
  const auto from_source = std::ranges::find_if(
      tensor.blocks, [](const Block& block) { return block.source != kConstant; });
  formats::PieceStorage storage{.file = {}, .byte_range = {}, .encoding = "recipe"};
  storage.stored_nbytes =
      static_cast<std::uint64_t>(numel_of(tensor.shape)) * itemsize(tensor.dtype);
  if (from_source == tensor.blocks.end()) return storage;
  const std::uint32_t source = from_source->source;
  const TensorEntry& below = base().contents().tensors[source];
  if (below.pieces.empty()) return storage;
  formats::PieceStorage stored = base().piece_storage(source, 0);
  if (below.pieces.size() == 1 && is_whole(tensor, source, below.meta.shape)) return stored;
  storage.file = std::move(stored.file);
  return storage;
}

formats::MissingData TransformedReader::find_missing_data() const {
  const formats::MissingData below = base().find_missing_data();
  formats::MissingData missing;
  if (below.pieces.empty() && below.values.empty()) return missing;
  for (std::size_t t = 0; t < pieces_.size(); ++t) {
    for (std::size_t p = 0; p < pieces_[t].size(); ++p) {
      for (const Block& block : pieces_[t][p].blocks.tensor().blocks) {
        const auto lost = below.pieces.find(block.source);
        if (lost == below.pieces.end()) continue;
        missing.pieces[t].emplace(p, lost->second.begin()->second);
        break;
      }
    }
  }
  for (std::size_t v = 0; v < made_.values.size(); ++v) {
    const auto lost = below.values.find(made_.values[v].sources.front());
    if (lost != below.values.end()) missing.values.emplace(v, lost->second);
  }
  return missing;
}

/// Returns whether rules change a tensor of a source of a merge.
bool change_tensors(const Rules& rules, const std::string& prefix,
                    const formats::MergeSource& source) {
  const std::vector<Input> inputs;
  const RuleMatcher matcher(rules, prefix, inputs, [](auto&&...) {});
  const std::string before = source.prefix.empty() ? "" : source.prefix + ".";
  const auto is_changed = [&](const std::string& fqn) {
    const auto match = matcher.match(before + fqn);
    return match && !rules.rules[match->rule].drops();
  };
  const CheckpointContents& contents = source.reader->contents();
  return std::ranges::any_of(contents.tensors,
                             [&](const TensorEntry& each) { return is_changed(each.meta.fqn); }) ||
         std::ranges::any_of(contents.aliases, is_changed, &formats::Alias::fqn);
}

/// Throws if a source whose tensors the rules change has another value of a variable in its
/// config.json. The sources of a combination all have the same names.
void require_equal_variables(const CheckpointReader& reader, const Rules& rules,
                             const RecipeOptions& options) {
  const auto merged = formats::sources_of_merge(reader);
  for (std::size_t s = 0; s < options.config_differences.size(); ++s) {
    const auto& difference = options.config_differences[s];
    if (!difference) continue;
    if (s >= merged.size() || change_tensors(rules, options.prefix, merged[s])) {
      throw Error(*difference);
    }
  }
}

}  // namespace

std::unique_ptr<CheckpointReader> open_transformed(std::unique_ptr<CheckpointReader> reader,
                                                   const Recipe& recipe,
                                                   const RecipeOptions& options) {
  const bool is_from = is_from_megatron(recipe, options.direction);
  const bool is_to = is_to_megatron(recipe, options.direction);
  const std::string path = reader->path();
  const CheckpointReader& source = *reader;  // a transformed reader owns it
  const Rules rules = rules_of(recipe, options);
  require_equal_variables(source, rules, options);
  if (is_from) require_new_order_of_rows(*reader);
  if (const auto named = rules_for_megatron(recipe, options.direction, reader->contents(), path)) {
    reader = std::make_unique<TransformedReader>(std::move(reader), *named, "");
  }
  const auto add_rules = [&](std::optional<RulesWithNote> further) {
    if (!further) return;
    reader = std::make_unique<TransformedReader>(std::move(reader), further->rules, "",
                                                 std::move(further->note));
  };
  if (is_from && use_rows(rules, options.prefix, reader->contents())) {
    // The rules for Megatron's names drop the object with the arguments.
    add_rules(
        rules_for_rows(recipe.path(), reader->contents(), row_orders_of(source, options), path));
  }
  const auto before = is_to ? names_with_rows(reader->contents()) : std::set<std::string>();
  reader = std::make_unique<TransformedReader>(std::move(reader), rules, options.prefix);
  if (is_to) add_rules(rules_for_made_rows(recipe.path(), *reader, options, before));
  return reader;
}

}  // namespace tessera::recipe
