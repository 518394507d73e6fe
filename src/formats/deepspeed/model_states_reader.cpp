#include "formats/deepspeed/model_states_reader.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "base/size_text.h"
#include "formats/deepspeed/client_state.h"
#include "formats/deepspeed/cut_rules.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

/// Members of a file of model states that do not appear under their own names in the checkpoint
/// that is read: `module` becomes tensors, `param_shapes` becomes the shapes of tensors.
constexpr std::array<std::string_view, 6> kConsumed = {
    "module",        "param_shapes",           "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "buffer_names"};

/// Members that DeepSpeed adds to what the user saves.
constexpr std::array<std::string_view, 12> kOfDeepSpeed = {"optimizer",
                                                           "data_sampler",
                                                           "random_ltd",
                                                           "skipped_steps",
                                                           "global_steps",
                                                           "dp_world_size",
                                                           "global_samples",
                                                           "mp_world_size",
                                                           "ds_config",
                                                           "ds_version",
                                                           "checkpoint_parallel_dimensions",
                                                           "sparse_tensor_module_names"};

/// Members of a file of optimizer states that say how the flat vectors were cut among the ranks.
constexpr std::array<std::string_view, 6> kOfPartition = {
    "param_slice_mappings",     "zero_stage",      "group_paddings",
    "param_alignment_paddings", "partition_count", kUniversalCheckpointInfo};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

constexpr std::string_view kConfig = "ds_config";
constexpr std::string_view kModelOfRankBegin = "zero_pp_rank_";

/// Returns whether an entry of the module is a tensor of the state dict. A module can also have
/// other entries (`_extra_state`).
bool is_plain_tensor(const Entry& entry) {
  return entry.path.size() == 2 && entry.kind == Entry::Kind::tensor;
}

/// Returns the paths of values and tensors that lie beside the dicts of the vectors' state.
std::set<Path> beside_state_of_vectors(const std::vector<const File*>& files, int stage) {
  std::set<Path> paths;
  for (const File* const file : files) {
    const Path state = path_of_state(*file, stage);
    for (const Entry* const entry : file->below(state)) {
      if (entry->path.size() > state.size() + 1) continue;
      const auto value = file->value_of(*entry);
      const bool is_dict = value && value->get_if<Value::Dict>() != nullptr;
      if (!is_dict) paths.insert(entry->path);
    }
  }
  return paths;
}

/// Returns `path`, followed by the keys `entry.keys[begin:]`.
KeyPath extended(KeyPath path, const Entry& entry, std::size_t begin) {
  path.insert(path.end(), entry.keys.begin() + static_cast<std::ptrdiff_t>(begin),
              entry.keys.end());
  return path;
}

}  // namespace

bool is_consumed_member(std::string_view member) {
  return contains(kConsumed, member);
}

bool is_member_of_deepspeed(std::string_view member) {
  return contains(kOfDeepSpeed, member);
}

std::variant<VectorForm, Error> ModelStatesReader::state_form(
    const Partition& partition, const std::vector<const File*>& optimizer, const Slice& slice,
    const Path& name, const std::string& fqn) {
  const auto known = forms_.find({&partition, slice.vector, name});
  if (known != forms_.end()) return known->second;
  auto form = form_of_state(partition, optimizer, slice, name, fqn);
  if (const auto* const found = std::get_if<VectorForm>(&form)) {
    forms_.emplace(std::tuple(&partition, slice.vector, name), *found);
  }
  return form;
}

void ModelStatesReader::open_model_states(const std::vector<std::string>& names) {
  std::vector<const File*> models;
  for (const std::string& name : names) models.push_back(&open_file(name));
  set_model_states(std::move(models));
}

void ModelStatesReader::set_model_states(std::vector<const File*> models) {
  models_ = std::move(models);
  for (const File* const file : models_) {
    if (file == nullptr) continue;
    for (const Entry* const entry : file->below({"module"})) {
      const std::uint32_t order = order_in(*file, entry->dict_order);
      const auto [known, is_new] = places_in_module_.emplace(entry->path[1], order);
      if (!is_new) known->second = std::min(known->second, order);
    }
  }
}

std::uint32_t ModelStatesReader::place_of(const KeyPath& path, std::uint32_t order) {
  if (path.front() == Key("optim")) return next_place();
  if (order > 0) return order;
  if (path.front() == Key("model") && path.size() > 1) {
    const auto place = places_in_module_.find(spell({path[1]}));
    if (place != places_in_module_.end()) return place->second;
  }
  return next_place();
}

void ModelStatesReader::require_module(bool may_be_none) const {
  const Entry* const entry = model().find({"module"});
  if (entry == nullptr && !model().below({"module"}).empty()) return;
  const auto value = entry == nullptr ? std::nullopt : model().value_of(*entry);
  if (value && (value->get_if<Value::Dict>() || (may_be_none && *value == Value()))) return;
  refuse(model(), {}, "module", "a dict of tensors",
         entry == nullptr ? "nothing" : (value ? value_to_string(*value) : "another object"));
}

void ModelStatesReader::add_rest_of_module(
    std::map<std::string, Shape> trained,
    const std::function<bool(const std::string& name, DType copy)>& is_rounded) {
  std::map<std::string, Shape>& known = trained;
  if (is_partitioned()) add_frozen_parts(known);
  add_ties(known);
  const std::set<std::string> buffers = buffer_names();
  const bool lists_buffers = model().value_at({"buffer_names"}).has_value();
  std::map<std::size_t, std::string> names;  // by tensor of the file
  for (const Entry* const entry : model().below({"module"})) {
    // Finds tied parameters that `shared_params` does not list, as in checkpoints without ZeRO.
    const bool is_known = is_plain_tensor(*entry) && known.contains(entry->path[1]);
    if (is_known && model().tensor(*entry).numel() > 0) names.emplace(entry->index, entry->path[1]);
  }
  std::size_t num_rounded = 0;
  std::vector<std::string> without_elements;
  for (const Entry* const entry : model().below({"module"})) {
    if (!is_plain_tensor(*entry)) continue;
    const std::string& name = entry->path[1];
    const TensorMeta& copy = model().tensor(*entry);
    if (const auto shape = known.find(name); shape != known.end()) {
      if (copy.numel() > 0 && copy.shape != shape->second) {
        refuse(model(), "model." + name, "shape in 'module'", shape_to_string(shape->second),
               shape_to_string(copy.shape));
      }
      num_rounded += std::size_t{copy.numel() > 0 && is_rounded(name, copy.dtype)};
    } else if (is_partitioned() && !buffers.contains(name) && copy.numel() == 0) {
      without_elements.push_back(name);
    } else if (const auto [first, is_new] = names.emplace(entry->index, name); !is_new) {
      add_alias(name, first->second);
    } else if (lists_buffers && !buffers.contains(name) && is_floating_point(copy.dtype) &&
               !copy.shape.empty()) {
      add_frozen(name, copy.shape, copy.dtype,
                 {{&model().reader(), entry->index, 0, copy.numel()}});
    } else {
      add_entry(text_keys({"model", name}), model(), *entry);
    }
  }
  note_rounded(num_rounded);
  note_ties_without_tensor({&model()},
                           [&](const std::string& name) { return known.contains(name); });
  note_without_elements(without_elements);
  if (!is_partitioned()) return;
  note_different_buffers({models_}, [&](const std::string& name) { return known.contains(name); });
}

/// Adds a frozen parameter. Run i is the part of rank i. The pieces are flat ranges, also a single
/// one: those of trained parameters are, and those of buffers are not.
void ModelStatesReader::add_frozen(const std::string& name, const Shape& shape, DType dtype,
                                   const std::vector<Run>& runs) {
  Tensor tensor = named(text_keys({"model", name}));
  tensor.entry.meta.shape = shape;
  tensor.entry.meta.dtype = dtype;
  std::int64_t end = 0;
  int rank = 0;
  for (const Run& run : runs) {
    tensor.pieces.push_back({models_[static_cast<std::size_t>(rank)], run.tensor, 0});
    tensor.entry.pieces.push_back({FlatRange{end, end + run.numel}, rank++});
    end += run.numel;
  }
  add(std::move(tensor));
}

void ModelStatesReader::add_ties(std::map<std::string, Shape>& known) {
  for (const Entry* const entry : model().below({"shared_params"})) {
    const auto target = model().value_of(*entry);
    const auto* const name = target ? target->get_if<std::string>() : nullptr;
    if (entry->path.size() != 2 || name == nullptr || !known.contains(*name)) continue;
    if (is_quantized_frozen(model(), *name)) continue;  // there is no tensor to be tied to
    const Shape shape = known.at(*name);
    if (known.emplace(entry->path[1], shape).second) add_alias(entry->path[1], *name);
  }
}

std::vector<std::string> ModelStatesReader::names_in_module(const std::string& parameter) const {
  std::vector<std::string> names{parameter};
  const Entry* const first = model().find({"module", parameter});
  for (const Entry* const entry : model().below({"shared_params"})) {
    const auto target = model().value_of(*entry);
    const auto* const name = target ? target->get_if<std::string>() : nullptr;
    if (entry->path.size() != 2 || name == nullptr || *name != parameter) continue;
    const Entry* const tied = model().find({"module", entry->path[1]});
    const bool is_same = first != nullptr && tied != nullptr && first->kind == tied->kind &&
                         first->index == tied->index;
    if (tied != nullptr && !is_same) names.push_back(entry->path[1]);
  }
  return names;
}

std::set<std::string> ModelStatesReader::buffer_names() const {
  std::set<std::string> names;
  const auto value = model().value_at({"buffer_names"});
  const auto* const list = value ? value->get_if<Value::List>() : nullptr;
  for (const Value& item : list == nullptr ? Value::List() : *list) {
    if (const auto* const name = item.get_if<std::string>()) names.insert(*name);
  }
  return names;
}

bool ModelStatesReader::is_partitioned(const File& model) {
  return model.name().starts_with(kModelOfRankBegin);
}

/// Adds the frozen parameters of stage 3, but for those whose fp32 weights are there: DeepSpeed
/// saves a parameter as trained and as frozen if it was frozen during the training.
void ModelStatesReader::add_frozen_parts(std::map<std::string, Shape>& known) {
  for (const Entry* const entry : model().below({"frozen_param_shapes"})) {
    const auto sizes = model().value_of(*entry);
    const auto shape = sizes && entry->path.size() == 2 ? shape_in(*sizes) : std::nullopt;
    if (!shape) {
      refuse(model(), entry->path.back(), "frozen_param_shapes", "a shape (a tuple of sizes)",
             "another kind of value");
    }
    const std::string& name = entry->path[1];
    if (!known.emplace(name, *shape).second) continue;
    if (is_quantized_frozen(model(), name)) {
      add_quantized_frozen(model(), name);
      continue;
    }
    const std::vector<Run> runs = runs_of_frozen(name, numel_of(*shape));
    const Entry* const part = model().find({"frozen_param_fragments", name});
    add_frozen(name, *shape, model().tensor(*part).dtype, runs);
  }
}

bool ModelStatesReader::is_quantized_frozen(const File& file, const std::string& name) {
  const Entry* const part = file.find({"frozen_param_fragments", name});
  const auto option = file.value_at(
      {std::string(kConfig), "zero_optimization", "zero_quantized_nontrainable_weights"});
  return option && *option == Value(true) && part != nullptr && part->kind == Entry::Kind::tensor &&
         file.tensor(*part).dtype == DType::int8;
}

void ModelStatesReader::add_quantized_frozen(const File& file, const std::string& name) {
  add_refused(text_keys({"model", name}),
              Error::expected(ErrorKind::unsupported,
                              {.path = file.reader().path(), .fqn = spell({"model", name})},
                              "frozen parameter", "its weights",
                              "int8 codes (zero_quantized_nontrainable_weights), whose scales "
                              "DeepSpeed saves in no file"));
}

std::vector<Run> ModelStatesReader::runs_of_frozen(const std::string& name,
                                                   std::int64_t numel) const {
  const auto ranks = static_cast<std::int64_t>(models_.size());
  const std::int64_t expected = numel / ranks + (numel % ranks != 0 ? 1 : 0);
  std::vector<Run> runs;
  std::optional<DType> dtype;
  std::int64_t end = 0;
  for (const File* const file : models_) {
    const Entry* const part = file->find({"frozen_param_fragments", name});
    const bool is_vector = part != nullptr && part->kind == Entry::Kind::tensor &&
                           file->tensor(*part).numel() == expected;
    if (!is_vector) {
      refuse(*file, "model." + name, "parts of ranks",
             "a vector of " + std::to_string(expected) + " elements",
             part == nullptr ? "none" : "a value, or a tensor with another number of elements");
    }
    const DType found = file->tensor(*part).dtype;
    if (dtype.value_or(found) != found) {
      refuse(*file, "model." + name, "dtype", std::string(dtype_name(*dtype)),
             std::string(dtype_name(found)));
    }
    dtype = found;
    const std::int64_t taken = std::min(expected, numel - end);
    if (taken == 0) continue;
    runs.push_back({&file->reader(), part->index, 0, taken});
    end += taken;
  }
  return runs;
}

void ModelStatesReader::add_members_of_model_states(std::set<std::string> left_out) {
  left_out_ = std::move(left_out);
  add_of_each_rank(models_, [&](const Entry& entry) {
    const std::string& member = entry.path.front();
    const bool is_of_module = member == "module" && entry.path.size() > 1;
    if (is_of_module && !is_plain_tensor(entry)) return below({"model"}, entry, 1);
    if (is_consumed_member(member) || left_out_.contains(member)) return Place{};
    return is_member_of_deepspeed(member) ? below({"deepspeed"}, entry, 0) : Place{};
  });
}

/// Returns the place below the dict `path`, with the keys `entry.keys[begin:]`. This dict may have
/// other keys on other ranks.
EntryReader::Place ModelStatesReader::below(KeyPath path, const Entry& entry, std::size_t begin) {
  const std::size_t num_joined = path.size();
  return {extended(std::move(path), entry, begin), num_joined};
}

bool ModelStatesReader::is_of_user(const std::string& member) const {
  return !is_consumed_member(member) && !is_member_of_deepspeed(member) &&
         !left_out_.contains(member);
}

std::set<std::string> ModelStatesReader::clashing_members() const {
  const OwnNames own(added_names());
  std::set<std::string> members;
  for (const File* const file : models_) {
    if (file == nullptr) continue;
    for (const Entry& entry : file->entries()) {
      const std::string& member = entry.path.front();
      if (!is_of_user(member) || members.contains(member)) continue;
      const bool is_per_rank = member == "per_rank" && !is_written_by_tessera_;
      if (is_per_rank || own.clashes(spell(entry.keys))) members.insert(member);
    }
  }
  return members;
}

std::string ModelStatesReader::key_for(const std::set<std::string>& clashing) const {
  std::set<std::string> taken;
  for (const File* const file : models_) {
    if (file == nullptr) continue;
    for (const Entry& entry : file->entries()) {
      const bool has_room = entry.path.size() > 1 && !clashing.contains(entry.path[1]);
      if (!has_room) taken.insert(entry.path.front());
    }
  }
  std::string key(kClientState);
  for (int i = 2; taken.contains(key); ++i) key = std::string(kClientState) + std::to_string(i);
  return key;
}

void ModelStatesReader::add_client_state() {
  const std::set<std::string> clashing = clashing_members();
  const std::string key = key_for(clashing);
  add_of_each_rank(models_, [&](const Entry& entry) {
    const std::string& member = entry.path.front();
    if (!is_of_user(member)) return Place{};
    return below(clashing.contains(member) ? KeyPath{key} : KeyPath{}, entry, 0);
  });
  for (const std::string& member : clashing) {
    note(std::string(kClientState), "members with other names than the entries that Tessera adds",
         "'" + printable(member) + "', read as '" + key + "." + printable(member) + "'");
  }
}

/// Compares the frozen parameters of stages 1 and 2 with the module's, which are read.
void ModelStatesReader::note_frozen_fragments() {
  std::vector<std::string> different;
  for (const File* const file : models_) {
    if (file == nullptr || is_partitioned(*file)) continue;
    for (const Entry* const entry : file->below({"frozen_param_fragments"})) {
      Path path = entry->path;
      path.front() = "module";
      const Entry* const read = file->find(path);
      const bool is_read = read != nullptr && are_equal(*file, *entry, *file, *read);
      if (!is_read) different.push_back(spell(entry->keys));
    }
  }
  if (different.empty()) return;
  note("copies", "in 'module' the tensors of 'frozen_param_fragments'",
       counted(different.size(), "tensor") + " that 'module' does not have, such as '" +
           printable(different.front()) + "'; 'module' is read");
}

void ModelStatesReader::finish() {
  add_client_state();
  note_frozen_fragments();
  EntryReader::finish();
}

void ModelStatesReader::add_members_beside_state(const std::vector<const File*>& files, int stage) {
  const Path optimizer = path_of_optimizer(stage);
  const Path weights = path_of_weights(stage);
  const bool has_list = path_of_state(*files.front(), stage) == optimizer;
  const auto is_state = [&](const Entry& entry) {
    return entry.path[1] == optimizer.back() || entry.path[1] == weights.back();
  };
  add_members_of_optimizer(files, {optimizer.front()}, is_state);
  const auto is_below = [&](const Entry& entry) {
    return entry.path.size() > optimizer.size() &&
           std::equal(optimizer.begin(), optimizer.end(), entry.path.begin());
  };
  const std::set<Path> beside = beside_state_of_vectors(files, stage);
  add_of_each_rank(files, [&](const Entry& entry) {
    if (!is_below(entry) || entry.path[2] == "param_groups") return Place{};
    const bool is_of_state = has_list || entry.path[2] == "state";
    if (is_of_state && !beside.contains(entry.path)) return Place{};
    return below({"deepspeed", "optimizer_state_dict", "base_optimizer_state"}, entry, 2);
  });
  add_of_each_rank(files, [&](const Entry& entry) {
    const std::string& member = entry.path.front();
    if (member == optimizer.front() || member == kConfig || member == "ds_version") {
      return Place{};
    }
    return below({"deepspeed", "optim_states"}, entry, 0);
  });
}

void ModelStatesReader::add_configurations(const std::vector<const File*>& optimizer) {
  std::vector<const File*> files = optimizer;
  for (std::size_t rank = 0; rank < models_.size(); ++rank) {
    if (models_[rank] != nullptr) files[rank] = models_[rank];
  }
  add_of_each_rank(files, [](const Entry& entry) {
    return entry.path.front() == kConfig ? below({"deepspeed"}, entry, 0) : Place{};
  });
}

void ModelStatesReader::add_members_of_optimizer(const std::vector<const File*>& files,
                                                 const Path& path,
                                                 const std::function<bool(const Entry&)>& is_used) {
  add_of_each_rank(files, [&](const Entry& entry) {
    const bool is_below =
        entry.path.size() > path.size() && std::equal(path.begin(), path.end(), entry.path.begin());
    if (!is_below || contains(kOfPartition, entry.path[path.size()]) || is_used(entry)) {
      return Place{};
    }
    return below({"deepspeed", "optimizer_state_dict"}, entry, path.size());
  });
}

void ModelStatesReader::add_state_entry(const std::string& fqn, const Path& name, const File& file,
                                        const Entry& entry, int rank,
                                        const std::function<void(const Path& target)>& add_parts) {
  has_state_ = true;
  Path target{"optim", "state", fqn};
  target.insert(target.end(), name.begin(), name.end());
  if (name == Path{"step"}) {
    add_step(text_keys(target), file, entry, rank);
  } else if (entry.kind == Entry::Kind::value || file.tensor(entry).shape.empty()) {
    add_entry(text_keys(target), file, entry, rank);
  } else {
    add_parts(target);
  }
}

void ModelStatesReader::add_state_without_items(const File& file, const Path& path) {
  if (has_state_ || file.below(path).empty()) return;
  add_value({std::string("optim"), std::string("state")}, Value(Value::Dict()));
}

void ModelStatesReader::add_param_groups(const File& file, const Path& path,
                                         const NamesInVector& names,
                                         std::optional<std::size_t> num_groups) {
  if (!num_groups && file.below(path).empty()) {
    note("groups", "the parameter groups of the optimizer",
         "none in " + file.name() +
             ", so learning rate, weight decay and other fields are missing (DeepSpeed saves none "
             "with elastic_checkpoint)");
  }
  for (const Entry* const entry : in_dict_order(file.below(path))) {
    const std::string& group = entry->path[path.size()];
    const auto number = static_cast<std::int64_t>(std::atoll(group.c_str()));
    if (num_groups && number >= static_cast<std::int64_t>(*num_groups)) continue;
    KeyPath target{"optim", "param_groups", number};
    target = extended(std::move(target), *entry, path.size() + 1);
    const auto value = file.value_of(*entry);
    const auto* const numbers = value ? value->get_if<Value::List>() : nullptr;
    if (entry->path.back() != "params" || numbers == nullptr) {
      add_entry(std::move(target), file, *entry);
      continue;
    }
    Value::List all;
    bool lists_params = true;
    for (const Value& item : *numbers) {
      const auto* const vector = item.get_if<std::int64_t>();
      if (vector == nullptr) continue;
      const auto listed = names(*vector);
      lists_params = lists_params && listed.has_value();
      if (listed) all.insert(all.end(), listed->begin(), listed->end());
    }
    if (lists_params) add_value(std::move(target), Value(std::move(all)));
  }
}

void ModelStatesReader::note_ties_without_tensor(
    const std::vector<const File*>& files, const std::function<bool(const std::string&)>& is_read) {
  std::set<std::string> names;
  for (const File* const file : files) {
    for (const Entry* const entry : file->below({"shared_params"})) {
      const std::string& name = entry->path[1];
      const Entry* const own = file->find({"module", name});
      const bool is_of_module =
          own != nullptr && own->kind == Entry::Kind::tensor && file->tensor(*own).numel() > 0;
      if (!is_read(name) && !is_of_module) names.insert(name);
    }
  }
  if (names.empty()) return;
  note("ties", "a tensor for each name in 'shared_params'",
       counted(names.size(), "name") + " without one, such as '" + printable(*names.begin()) +
           "': left out");
}

void ModelStatesReader::note_rounded(std::size_t num_rounded) {
  if (num_rounded == 0) return;
  note("copies", "each parameter once",
       counted(num_rounded, "name") + " also in 'module', in the dtype of the model; the fp32 " +
           "master weights are read");
}

std::string ModelStatesReader::advice_about_copies(const File& model, const std::string& place) {
  const std::string advice = "the master weights are read";
  if (model.below({"ds_config", "zero_optimization", "zenflow"}).empty()) return advice;
  return advice + ", but with ZenFlow the module's copies are newer; they are " + place;
}

void ModelStatesReader::note_without_elements(const std::vector<std::string>& names) {
  if (names.empty()) return;
  note("module", "elements of each name on at least one rank",
       counted(names.size(), "name") + " without elements, such as '" + printable(names.front()) +
           "' (a tied parameter that ZeRO stage 3 does not record?)");
}

void ModelStatesReader::note_different_buffers(
    const std::vector<std::vector<const File*>>& of_ranks,
    const std::function<bool(const std::string& name)>& is_parameter) {
  std::set<std::string> different;
  std::set<std::string> different_copies;  // of parameters
  for (const std::vector<const File*>& files : of_ranks) {
    const File& first = *files.front();
    std::set<Path> tensors;
    for (const File* const file : files) {
      for (const Entry* const entry : file->below({"module"})) {
        const bool has_elements = is_plain_tensor(*entry) && file->tensor(*entry).numel() > 0;
        if (has_elements) tensors.insert(entry->path);
      }
    }
    for (const Path& path : tensors) {
      const Entry* const read = first.find(path);
      const auto differs = [&](const File* file) {
        const Entry* const other = file->find(path);
        if (read == nullptr || other == nullptr) return read != other;
        return !are_equal(first, *read, *file, *other);
      };
      if (!std::ranges::any_of(files, differs)) continue;
      (is_parameter(path.back()) ? different_copies : different).insert(path.back());
    }
  }
  const auto note_names = [&](const std::set<std::string>& names, const std::string& expected,
                              const std::string& read) {
    if (names.empty()) return;
    note("ranks", expected,
         counted(names.size(), "name") + " with other bytes on some rank, such as '" +
             printable(*names.begin()) + "'; " + read);
  };
  note_names(different, "equal buffers on all ranks", "the buffers of rank 0 are read");
  note_names(different_copies, "equal copies of parameters in the modules of all ranks",
             "the copies are left out");
}

}  // namespace tessera::formats::deepspeed
