#include "reshard/optimizer_params.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/size_text.h"
#include "base/text_parts.h"
#include "formats/per_rank.h"
#include "reshard/numbered_optimizer.h"
#include "reshard/optimizer_numbers.h"
#include "reshard/optimizer_rules.h"
#include "reshard/params_search.h"
#include "reshard/renamed_entries.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::KeyPath;
using formats::TensorEntry;

constexpr std::string_view kNamesRule = "names of parameters";
constexpr std::uint64_t kMaxListNbytes = std::uint64_t{64} << 20;

/// The names of the parameters, all groups one after another, and where they are from.
struct ParamNames {
  std::vector<std::string> names;
  std::string path;                        // of the file or checkpoint that has the names
  std::optional<Finding> order_note = {};  // says that only an order tells some of them
};

[[noreturn]] void refuse(ErrorKind kind, const ErrorWhere& where, std::string_view expected,
                         const std::string& found, std::string_view likely_cause = {}) {
  throw Error::expected(kind, where, kNamesRule, expected, found, likely_cause);
}

std::vector<std::string> parse_list(const OptimizerParams& params) {
  // Reads one level more than a list of names has. Then an error can show an item that is a list.
  constexpr int kMaxDepth = 2;
  const Value json =
      parse_json(params.names, params.path, {.max_depth = kMaxDepth, .max_nbytes = kMaxListNbytes});
  const auto* list = json.get_if<Value::List>();
  if (list == nullptr) {
    refuse(ErrorKind::corruption, {.path = params.path}, "a list of names", value_to_string(json));
  }
  std::vector<std::string> names;
  for (const Value& item : *list) {
    const auto* name = item.get_if<std::string>();
    if (name == nullptr || name->empty()) {
      refuse(ErrorKind::corruption, {.path = params.path},
             "a name at position " + std::to_string(names.size()), value_to_string(item));
    }
    names.push_back(*name);
  }
  return names;
}

/// Checks that there is one name for each number, and that no name occurs twice.
void check_list(const ParamNames& given, const NumberedOptimizer& optimizer) {
  const std::size_t num_params = optimizer.num_params();
  if (given.names.size() != num_params) {
    std::string per_group;
    for (const auto& group : optimizer.groups) {
      per_group += (per_group.empty() ? "" : " + ") + std::to_string(group.size());
    }
    refuse(ErrorKind::mismatch, {.path = given.path},
           std::to_string(num_params) + ", as the groups of '" + printable(optimizer.root) +
               "param_groups' have (" + per_group + ")",
           std::to_string(given.names.size()));
  }
  std::map<std::string_view, std::size_t> seen;
  for (std::size_t i = 0; i < num_params; ++i) {
    const auto [known, is_new] = seen.emplace(given.names[i], i);
    if (is_new) continue;
    refuse(ErrorKind::mismatch, {.path = given.path, .fqn = given.names[i]}, "each name once",
           "this name at positions " + std::to_string(known->second) + " and " + std::to_string(i));
  }
}

// Names found in the checkpoint

bool is_buffer_of_norm(std::string_view name) {
  constexpr std::string_view kBuffers[] = {"running_mean", "running_var", "num_batches_tracked"};
  return std::ranges::find(kBuffers, name.substr(name.rfind('.') + 1)) != std::end(kBuffers);
}

/// Returns the tensors that may be parameters, by name. A tensor with aliases is there under each
/// name.
std::map<std::string, const TensorEntry*> find_candidates(const CheckpointContents& contents) {
  const OptimizerEntries of_optimizers(contents);
  std::map<std::string, const TensorEntry*> found;
  const auto add = [&](const std::string& name, const TensorEntry* tensor) {
    if (tensor == nullptr || !is_floating_point(tensor->meta.dtype)) return;
    if (is_buffer_of_norm(name) || of_optimizers.contain(name)) return;
    if (of_optimizers.may_contain(name)) return;
    if (formats::parse_per_rank_name(name)) return;
    found.emplace(name, tensor);
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn, &tensor);
  for (const auto& alias : contents.aliases) add(alias.fqn, contents.find_tensor(alias.target));
  return found;
}

/// Returns whether a program may have sorted the names, as Tessera's writers do. Sorted names do
/// not tell the model's order, in which a weight comes before its bias.
bool is_sorted(const std::vector<std::string>& names) {
  const auto components = [](const std::string& name) { return tessera::detail::split(name, '.'); };
  return std::ranges::is_sorted(names) || std::ranges::is_sorted(names, {}, components);
}

/// Returns the candidates in the first order of `reader.dict_orders()` that has all of them and is
/// not sorted, each tensor under its first name there. Returns nothing if there is no such order.
std::optional<std::vector<ParamCandidate>> in_dict_order(
    const CheckpointReader& reader, const std::map<std::string, const TensorEntry*>& candidates) {
  for (const std::vector<std::string>& order : reader.dict_orders()) {
    std::vector<ParamCandidate> ordered;
    std::vector<std::string> names;
    std::set<const TensorEntry*> seen;
    for (const std::string& name : order) {
      const auto found = candidates.find(name);
      if (found == candidates.end()) continue;
      names.push_back(name);
      if (!seen.insert(found->second).second) continue;
      ordered.push_back({name, found->second->meta.shape});
    }
    if (names.size() == candidates.size() && !is_sorted(names)) return ordered;
  }
  return std::nullopt;
}

/// Returns the length of the prefix that all names share and that is not part of a model's names.
/// For the optimizer's root `run.optim.` and names such as `run.model.up`, the prefix is
/// `run.model.`: the keys that lead to the optimizer, then a key such as `model.`.
std::size_t prefix_nbytes(const std::string& root, const std::vector<std::string>& names) {
  constexpr std::string_view kKeys[] = {"model.", "state_dict.", "model_state_dict.",
                                        "module_state_dict."};
  const auto all_begin_with = [&](const std::string& prefix) {
    return std::ranges::all_of(names,
                               [&](const std::string& name) { return name.starts_with(prefix); });
  };
  std::string above = root;
  while (!above.empty()) {  // drops the last key of the root, then the key before it
    above.pop_back();
    above.resize(above.rfind('.') == std::string::npos ? 0 : above.rfind('.') + 1);
    if (!all_begin_with(above)) continue;
    break;
  }
  for (const std::string_view key : kKeys) {
    if (all_begin_with(above + std::string(key))) return above.size() + key.size();
  }
  return above.size();
}

/// Returns the candidates that `only` selects. If they are fewer than the optimizer's parameters,
/// returns all candidates.
std::map<std::string, const TensorEntry*> selected_candidates(const CheckpointContents& contents,
                                                              const NameSelection& only,
                                                              std::size_t num_params) {
  auto candidates = find_candidates(contents);
  auto selected = candidates;
  std::erase_if(selected, [&](const auto& candidate) { return !only.selects(candidate.first); });
  return selected.size() < num_params ? candidates : selected;
}

/// Throws if no tensor that may be a parameter has as many elements as the flat state of a number.
/// Such state is of a flat parameter of FSDP1, which contains several parameters.
void refuse_flat_params(const CheckpointReader& reader, const NumberedOptimizer& optimizer) {
  if (optimizer.flat.empty()) return;
  const auto candidates = find_candidates(reader.contents());
  for (const std::string& number : optimizer.flat) {
    if (optimizer.unsure.contains(number)) continue;
    const std::int64_t numel = numel_of(optimizer.shapes.at(number));
    const auto has_numel = [&](const auto& candidate) {
      return candidate.second->meta.numel() == numel;
    };
    if (std::ranges::any_of(candidates, has_numel)) continue;
    refuse(ErrorKind::mismatch, {.path = reader.path(), .fqn = optimizer.root + "state." + number},
           "a tensor with the " + std::to_string(numel) + " elements of this flat state",
           "none: the state is of a flat parameter of FSDP1 (use_orig_params=False), or the "
           "checkpoint has no model",
           "save the optimizer with FSDP.optim_state_dict(), and the model beside it");
  }
}

/// Returns a note about parameters that have several candidates, of which only the order of the
/// file chose one; nothing if there are none. The order of the optimizer may be another one.
std::optional<Finding> note_on_order(const std::vector<std::vector<NumberedParam>>& groups,
                                     const std::vector<ParamCandidate>& candidates,
                                     const std::string& path) {
  std::map<Shape, std::size_t> of_shape;
  std::map<std::int64_t, std::size_t> of_numel;
  for (const ParamCandidate& candidate : candidates) {
    ++of_shape[candidate.shape];
    ++of_numel[numel_of(candidate.shape)];
  }
  const auto num_candidates = [&](const NumberedParam& param) {
    if (!param.shape) return candidates.size();
    return param.is_flat ? of_numel[numel_of(*param.shape)] : of_shape[*param.shape];
  };
  std::size_t num_by_order = 0;
  std::string first;
  for (const auto& group : groups) {
    for (const NumberedParam& param : group) {
      if (num_candidates(param) > 1 && num_by_order++ == 0) first = param.number;
    }
  }
  if (num_by_order == 0) return std::nullopt;
  return Finding{
      .severity = Finding::Severity::note,
      .rule = std::string(kNamesRule),
      .where = {.path = path},
      .expected = "param_names, or shapes that tell which number is which parameter",
      .found = "several tensors for " + counted(num_by_order, "number") + ", such as number " +
               first +
               "; the order of the file decides (give a list if the optimizer has another)"};
}

ParamNames find_names(const CheckpointReader& reader, const NumberedOptimizer& optimizer,
                      const NameSelection& only) {
  ParamNames found{.names = {}, .path = reader.path()};
  if (!optimizer.param_names.empty()) {
    for (const auto& group : optimizer.param_names) {
      found.names.insert(found.names.end(), group.begin(), group.end());
    }
    return found;
  }
  std::vector<std::vector<NumberedParam>> groups;
  for (const auto& numbers : optimizer.groups) {
    std::vector<NumberedParam>& group = groups.emplace_back();
    for (const std::string& number : numbers) {
      const auto shape = optimizer.shapes.find(number);
      const bool is_sure = shape != optimizer.shapes.end() && !optimizer.unsure.contains(number);
      group.push_back({number, is_sure ? std::optional(shape->second) : std::nullopt,
                       is_sure && optimizer.flat.contains(number)});
    }
  }
  const auto candidates = selected_candidates(reader.contents(), only, optimizer.num_params());
  const auto ordered = in_dict_order(reader, candidates);
  std::vector<ParamCandidate> unordered;
  for (const auto& [name, tensor] : candidates) unordered.push_back({name, tensor->meta.shape});
  const std::vector<ParamCandidate>& searched = ordered ? *ordered : unordered;
  const std::vector<std::size_t> choice =
      (ordered ? params_in_order : params_by_shape)(groups, searched, reader.path());
  for (const std::size_t chosen : choice) found.names.push_back(searched[chosen].name);
  if (ordered) found.order_note = note_on_order(groups, *ordered, reader.path());
  const std::size_t nbytes = prefix_nbytes(optimizer.root, found.names);
  for (std::string& name : found.names) name.erase(0, nbytes);
  return found;
}

// The checkpoint with names instead of numbers

/// Reads a checkpoint, and shows names of parameters where one optimizer has numbers.
class NamedParamsReader final : public RenamedEntries {
 public:
  NamedParamsReader(std::unique_ptr<CheckpointReader> source, const NumberedOptimizer& optimizer,
                    std::map<std::string, std::string> names,
                    const std::map<std::string, Shape>& shapes)
      : RenamedEntries(std::move(source)),
        root_(optimizer.root),
        names_(std::move(names)),
        shapes_(shapes),
        params_values_(optimizer.values.begin(), optimizer.values.end()) {
    rename_entries("state only under a number", "also state under this name");
  }

 private:
  bool rename(std::string& name, formats::SharedKeyPath& path) const override {
    for (const NumberPlace& place : number_places(name, path)) {
      if (!place.is_of(name, root_)) continue;
      const std::string& param = names_.at(std::string(place.number(name)));
      path = path_with_name(path, place, param);
      name.replace(place.begin, place.end - place.begin, param);
      return true;
    }
    return false;
  }

  std::string renamed_text(const std::string& name) const override {
    const std::size_t begin = place_behind(name, root_ + "state.");
    if (begin == std::string::npos) return name;
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const auto param = names_.find(name.substr(begin, end - begin));
    return param == names_.end() ? name : name.substr(0, begin) + param->second + name.substr(end);
  }

  /// Gives flat state the shape of its parameter. Each rank keeps its range of the elements.
  void change(TensorEntry& tensor) const override {
    if (!is_flat_state(tensor)) return;
    for (const NumberPlace& place : number_places(tensor.meta.fqn, tensor.key_path)) {
      if (!place.is_of(tensor.meta.fqn, root_)) continue;
      const auto shape = shapes_.find(std::string(place.number(tensor.meta.fqn)));
      if (shape == shapes_.end() || !is_pointwise_name(place.entry(tensor.meta.fqn))) continue;
      if (numel_of(shape->second) != tensor.meta.numel()) continue;
      tensor.meta.shape = shape->second;
      return;
    }
  }

  Value changed(std::size_t value_in_source, Value value) const override {
    return params_values_.contains(value_in_source) ? params_with_names(std::move(value), names_)
                                                    : value;
  }

  std::string root_;
  std::map<std::string, std::string> names_;  // names of parameters, by number
  std::map<std::string, Shape> shapes_;       // shapes of parameters, by number
  std::set<std::size_t> params_values_;       // indices of the source's values that list numbers
};

// Comparison of the names with the tensors of the checkpoint

/// Returns for each name the tensor that classify_state finds as its parameter; nullptr if it finds
/// none.
std::vector<const TensorEntry*> find_parameters(const CheckpointContents& contents,
                                                const std::string& root,
                                                const std::vector<std::string>& names) {
  CheckpointContents probe;  // all tensors, and an entry `state.<name>.step` for each name
  probe.aliases = contents.aliases;
  probe.values.push_back({.name = root + "param_groups"});  // makes the entries optimizer state
  const OptimizerEntries of_optimizers(contents);
  for (const TensorEntry& tensor : contents.tensors) {
    if (!of_optimizers.contain(tensor.meta.fqn)) probe.tensors.push_back(tensor);
  }
  const auto step_of = [&](const std::string& name) { return root + "state." + name + ".step"; };
  for (const std::string& name : names) {
    probe.tensors.push_back({.meta = {.fqn = step_of(name), .dtype = DType::float32, .shape = {}}});
  }
  std::ranges::sort(probe.tensors, {},
                    [](const TensorEntry& each) -> const std::string& { return each.meta.fqn; });
  const std::vector<StateRole> roles = classify_state(probe);
  std::vector<const TensorEntry*> found;
  for (const std::string& name : names) {
    const TensorEntry* step = probe.find_tensor(step_of(name));
    const StateRole& role = roles[static_cast<std::size_t>(step - probe.tensors.data())];
    const bool is_found = role.parameter_index && role.kind == formats::StateKind::scalar_parameter;
    found.push_back(is_found ? contents.find_tensor(probe.tensors[*role.parameter_index].meta.fqn)
                             : nullptr);
  }
  return found;
}

/// Returns for how many numbers, at most, the parameters in any order have the shapes of the state.
/// Counts only numbers whose state surely has the shape of the parameter.
std::size_t most_that_fit(const NumberedOptimizer& optimizer,
                          const std::vector<const TensorEntry*>& parameters) {
  std::map<Shape, std::size_t> of_shape;
  for (const TensorEntry* parameter : parameters) ++of_shape[parameter->meta.shape];
  const auto take = [](auto& free, const auto& key) {
    const auto found = free.find(key);
    if (found == free.end() || found->second == 0) return false;
    --found->second;
    return true;
  };
  std::size_t num_fitting = 0;
  std::vector<std::int64_t> flat;  // last, because they also fit other shapes
  for (const auto& [number, shape] : optimizer.shapes) {
    if (optimizer.unsure.contains(number)) continue;
    if (optimizer.flat.contains(number)) {
      flat.push_back(numel_of(shape));
    } else if (take(of_shape, shape)) {
      ++num_fitting;
    }
  }
  std::map<std::int64_t, std::size_t> of_numel;
  for (const auto& [shape, count] : of_shape) of_numel[numel_of(shape)] += count;
  for (const std::int64_t numel : flat) {
    if (take(of_numel, numel)) ++num_fitting;
  }
  return num_fitting;
}

/// Returns whether Adafactor can have state of this name and shape for a parameter. Returns nothing
/// for other names. PyTorch's Adafactor keeps `row_var` [rows, 1] and `col_var` [1, columns] of a
/// matrix and `variance` of a vector (with FSDP1, any parameter is one), that of transformers the
/// first two as vectors.
std::optional<bool> fits_adafactor(std::string_view entry, const Shape& state,
                                   const Shape& parameter) {
  if (entry == "variance") {
    return state == parameter || state == Shape{numel_of(parameter)};
  }
  const bool is_torch = entry == "row_var" || entry == "col_var";
  const bool is_row = entry == "row_var" || entry == "exp_avg_sq_row";
  if (!is_torch && !is_row && entry != "exp_avg_sq_col") return std::nullopt;
  if (parameter.size() < 2) return false;
  const std::size_t reduced = parameter.size() - (is_row ? 1 : 2);
  Shape expected;
  for (std::size_t dim = 0; dim < parameter.size(); ++dim) {
    if (dim != reduced) {
      expected.push_back(parameter[dim]);
    } else if (is_torch) {
      expected.push_back(1);
    }
  }
  return state == expected;
}

/// Checks that each parameter has the shape of its pointwise state, or a shape that fits its state
/// of Adafactor. Smaller pointwise state is accepted (a move notes it), because some optimizers
/// keep it under the same names, if some other state fits or all state is scalar, and if no other
/// order of the names fits more state.
void check_shapes(const CheckpointContents& contents, const NumberedOptimizer& optimizer,
                  const ParamNames& given, const std::vector<std::string>& numbers,
                  const std::vector<const TensorEntry*>& parameters) {
  std::unordered_map<std::string_view, std::size_t> place_of;
  for (std::size_t i = 0; i < numbers.size(); ++i) place_of.emplace(numbers[i], i);
  std::set<std::size_t> misfits;  // places of numbers
  bool are_smaller = true;        // the state of all misfits is smaller than the parameter
  bool are_scalars = true;
  std::optional<Error> first_misfit;
  for (const TensorEntry& tensor : contents.tensors) {
    const std::string& name = tensor.meta.fqn;
    for (const NumberPlace& place : number_places(name, tensor.key_path)) {
      if (!place.is_of(name, optimizer.root)) continue;
      const std::size_t i = place_of.at(place.number(name));
      if (optimizer.unsure.contains(numbers[i])) continue;
      const std::string rank(name, 0, name.size() - formats::name_without_rank(name).size());
      const TensorEntry* own = contents.find_tensor(rank + parameters[i]->meta.fqn);
      const TensorMeta& parameter = (own == nullptr ? parameters[i] : own)->meta;
      const auto fits = fits_adafactor(place.entry(name), tensor.meta.shape, parameter.shape);
      if (fits && !*fits) {
        throw Error::expected(
            ErrorKind::mismatch, {.path = given.path, .fqn = given.names[i]}, kNamesRule,
            "a parameter that Adafactor's " + std::string(place.entry(name)) + ' ' +
                shape_to_string(tensor.meta.shape) + " of number " + numbers[i] + " fits",
            "a parameter of shape " + shape_to_string(parameter.shape),
            "is the order of the names the optimizer's order?");
      }
      if (!is_pointwise_name(place.entry(name)) || tensor.meta.shape == parameter.shape) continue;
      if (is_flat_state(tensor) && tensor.meta.numel() == parameter.numel()) continue;
      misfits.insert(i);
      const bool is_smaller =
          tensor.meta.shape.empty() || (tensor.meta.numel() < parameter.numel() &&
                                        tensor.meta.shape.size() <= parameter.shape.size());
      are_scalars &= tensor.meta.shape.empty();
      // The error names a misfit that is wrong in any case, if there is one.
      if (first_misfit && (is_smaller || !are_smaller)) continue;
      are_smaller = is_smaller;
      first_misfit = Error::expected(
          ErrorKind::mismatch, {.path = given.path, .fqn = given.names[i]}, kNamesRule,
          "a parameter of shape " + shape_to_string(tensor.meta.shape) + " for number " +
              numbers[i] + ", because its " + std::string(place.entry(name)) + " has this shape",
          "a parameter of shape " + shape_to_string(parameter.shape),
          "is the order of the names the optimizer's order?");
    }
  }
  const auto is_sure = [&](const auto& number) { return !optimizer.unsure.contains(number.first); };
  const auto num_sure = static_cast<std::size_t>(std::ranges::count_if(optimizer.shapes, is_sure));
  const std::size_t num_fitting = num_sure - misfits.size();
  const bool may_be_smaller = are_smaller && (num_fitting > 0 || are_scalars);
  if (first_misfit && !(may_be_smaller && num_fitting >= most_that_fit(optimizer, parameters))) {
    throw *first_misfit;
  }
}

/// Checks that the names are tensors of the checkpoint, with shapes as check_shapes says. Adds
/// these shapes to `shapes`, by number. Returns a note if the checkpoint has none of these tensors,
/// and too few others that may be parameters: then nothing can be checked.
std::optional<Finding> check_names(const CheckpointReader& reader,
                                   const NumberedOptimizer& optimizer, const ParamNames& given,
                                   std::map<std::string, Shape>& shapes) {
  const CheckpointContents& contents = reader.contents();
  const auto parameters = find_parameters(contents, optimizer.root, given.names);
  const auto missing = std::ranges::find(parameters, nullptr);
  if (missing == parameters.end()) {
    std::vector<std::string> numbers;
    for (const auto& group : optimizer.groups) {
      numbers.insert(numbers.end(), group.begin(), group.end());
    }
    check_shapes(contents, optimizer, given, numbers, parameters);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      shapes.emplace(numbers[i], parameters[i]->meta.shape);
    }
    return std::nullopt;
  }
  const bool none_found =
      std::ranges::all_of(parameters, [](const TensorEntry* found) { return found == nullptr; });
  if (none_found && find_candidates(contents).size() < parameters.size()) {
    return Finding{.severity = Finding::Severity::note,
                   .rule = std::string(kNamesRule),
                   .where = {.path = reader.path()},
                   .expected = "the parameters, to compare their shapes with the state",
                   .found = "none of them in this checkpoint: the shapes are not checked"};
  }
  const auto num_missing = std::ranges::count(parameters, nullptr);
  refuse(ErrorKind::mismatch,
         {.path = given.path,
          .fqn = given.names[static_cast<std::size_t>(missing - parameters.begin())]},
         "a tensor of " + printable(reader.path()),
         "none of this name; " + std::to_string(num_missing) + " of " +
             std::to_string(parameters.size()) + " names are missing there");
}

}  // namespace

OptimizerParams read_optimizer_params(const FileSystem& fs, const std::string& option) {
  if (option == kAutomaticParams || option == kParamsAsNumbers) {
    return {.names = option, .path = {}};
  }
  return {.names = read_file(fs, option, kMaxListNbytes), .path = option};
}

std::unique_ptr<CheckpointReader> name_optimizer_params(std::unique_ptr<CheckpointReader> source,
                                                        const OptimizerParams& params,
                                                        const NameSelection& only) {
  if (params.names == kParamsAsNumbers) return number_optimizer_params(std::move(source), only);
  const NumberedOptimizer optimizer = find_numbered_optimizer(*source, only);
  refuse_flat_params(*source, optimizer);
  const ParamNames given = params.names == kAutomaticParams
                               ? find_names(*source, optimizer, only)
                               : ParamNames{.names = parse_list(params), .path = params.path};
  check_list(given, optimizer);
  std::map<std::string, Shape> shapes;
  std::optional<Finding> note = check_names(*source, optimizer, given, shapes);
  std::map<std::string, std::string> names;
  std::size_t i = 0;
  for (const auto& group : optimizer.groups) {
    for (const std::string& number : group) names.emplace(number, given.names[i++]);
  }
  auto reader =
      std::make_unique<NamedParamsReader>(std::move(source), optimizer, std::move(names), shapes);
  if (note) reader->add_note(std::move(*note));
  if (given.order_note) reader->add_note(*given.order_note);
  return reader;
}

std::unique_ptr<CheckpointReader> apply_params_and_recipe(
    std::unique_ptr<CheckpointReader> source, const OptimizerParams* params,
    const NameSelection& only,
    const std::function<std::unique_ptr<CheckpointReader>(std::unique_ptr<CheckpointReader>)>&
        apply_recipe) {
  if (params == nullptr) return apply_recipe(std::move(source));
  if (params->names == kParamsAsNumbers) {
    return name_optimizer_params(apply_recipe(std::move(source)), *params, only);
  }
  return apply_recipe(name_optimizer_params(std::move(source), *params, only));
}

}  // namespace tessera::reshard
