#include "formats/deepspeed/one_save.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

#include "formats/deepspeed/family.h"
#include "tessera/base/dtype.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

std::string in_words(const Path& path) {
  std::string words;
  for (const std::string& key : path) words += (words.empty() ? "" : ".") + key;
  return words;
}

[[noreturn]] void refuse_at(const File& file, const Path& path, const std::string& expected,
                            const std::string& found) {
  throw Error::expected(ErrorKind::corruption, {.path = file.reader().path()}, in_words(path),
                        expected, found, "a rank of another run or step?");
}

std::string in_words(const std::optional<Value>& value) {
  return value ? value_to_string(*value) : "nothing";
}

void require_equal(const File& first, const File& other, const Path& path) {
  const auto expected = first.value_at(path);
  const auto found = other.value_at(path);
  if (expected == found) return;
  refuse_at(other, path, in_words(expected) + ", as in " + first.name(), in_words(found));
}

/// Checks that all values and tensors below a path are equal.
void require_equal_below(const File& first, const File& other, const Path& path) {
  for (const Entry* const entry : first.below(path)) {
    if (entry->kind == Entry::Kind::value) {
      require_equal(first, other, entry->path);
      continue;
    }
    const Entry* const same = other.find(entry->path);
    if (same != nullptr && are_equal(first, *entry, other, *same)) continue;
    refuse_at(other, entry->path, "the tensor that " + first.name() + " has",
              same == nullptr ? "no tensor" : "a different tensor");
  }
  const std::size_t expected = first.below(path).size();
  const std::size_t found = other.below(path).size();
  if (expected == found) return;
  refuse_at(other, path, std::to_string(expected) + " entries, as in " + first.name(),
            std::to_string(found));
}

/// Reads a scalar tensor.
std::vector<std::byte> scalar(const File& file, const Entry& entry) {
  std::vector<std::byte> bytes(itemsize(file.tensor(entry).dtype));
  file.reader().read_piece(entry.index, 0, {0, 1}, bytes);
  return bytes;
}

/// Returns whether the entry is a dict without items: state of a vector that the optimizer keeps no
/// state for. If a rank has only padding of the vector, its file has no entry instead.
bool is_empty_dict(const File& file, const Entry& entry) {
  const auto value = file.value_of(entry);
  const auto* const dict = value ? value->get_if<Value::Dict>() : nullptr;
  return dict != nullptr && dict->empty();
}

/// Checks that `other` has all scalars of `first` in optimizer state (the step), with equal values.
void require_equal_scalars(const File& first, const File& other, const Path& path) {
  for (const Entry* const entry : first.below(path)) {
    const bool is_missing = other.find(entry->path) == nullptr && other.below(entry->path).empty();
    if (is_missing && is_empty_dict(first, *entry)) continue;
    if (entry->kind == Entry::Kind::value) require_equal(first, other, entry->path);
    if (entry->kind == Entry::Kind::value || !first.tensor(*entry).shape.empty()) continue;
    const Entry* const same = other.find(entry->path);
    const bool is_scalar = same != nullptr && same->kind == Entry::Kind::tensor &&
                           other.tensor(*same).shape.empty() &&
                           other.tensor(*same).dtype == first.tensor(*entry).dtype;
    if (is_scalar && scalar(first, *entry) == scalar(other, *same)) continue;
    refuse_at(other, entry->path, "the number that " + first.name() + " has",
              is_scalar ? "a different number" : "none");
  }
}

/// Checks that `other` has no optimizer state that `first` lacks, except dicts without items. The
/// opposite case, state that only the first rank has, is found later, when the ranks' parts are
/// joined.
void require_no_further_state(const File& first, const File& other, const Path& path) {
  for (const Entry* const entry : other.below(path)) {
    const bool is_of_groups = entry->path[path.size()] == "param_groups";  // no `state`
    if (is_of_groups || first.find(entry->path) != nullptr) continue;
    if (first.below(entry->path).empty() && is_empty_dict(other, *entry)) continue;
    refuse_at(
        other, entry->path, "no entry, as in " + first.name(),
        entry->kind == Entry::Kind::value ? in_words(other.value_at(entry->path)) : "a tensor");
  }
}

/// Throws if there is state of a vector without fp32 weights. Does not check a list of states.
void require_state_of_vectors(const File& file, int stage) {
  const Path state = path_of_state(file, stage);
  const bool is_dict = state.back() == "state";
  for (const Entry* const entry : file.below(state)) {
    if (entry->path.size() <= state.size() + 1 || !is_dict) continue;
    Path vector = path_of_weights(stage);
    vector.push_back(entry->path[state.size()]);
    if (file.find(vector) != nullptr) continue;
    refuse_at(file, entry->path, "the state of a vector of fp32 weights",
              "state of vector " + vector.back() + ", which has no fp32 weights");
  }
}

/// If the file records how many ranks share each vector, checks that this is `num_ranks`.
void require_partition_count(const File& file, std::size_t num_ranks) {
  const Path path{"optimizer_state_dict", "partition_count"};
  const auto count = file.value_at(path);
  if (!count) return;
  const auto* const list = count->get_if<Value::List>();
  for (const Value& item : list == nullptr ? Value::List{*count} : *list) {
    const auto* const number = item.get_if<std::int64_t>();
    if (number != nullptr && *number == static_cast<std::int64_t>(num_ranks)) continue;
    throw Error::expected(ErrorKind::corruption, {.path = file.reader().path()}, in_words(path),
                          "the number of files with optimizer states, " + std::to_string(num_ranks),
                          value_to_string(item), "not copied from all hosts?");
  }
}

void require_world_sizes(const std::string& folder, const File& model, std::size_t num_ranks,
                         std::size_t num_model_ranks) {
  const auto recorded = model.number_at({"dp_world_size"});
  if (recorded && *recorded != static_cast<std::int64_t>(num_ranks)) {
    throw Error::expected(ErrorKind::corruption, {.path = folder}, "files of ranks",
                          "optimizer states of " + std::to_string(*recorded) +
                              " ranks, as dp_world_size of " + model.name() + " says",
                          "optimizer states of " + std::to_string(num_ranks),
                          "not copied from all hosts?");
  }
  const std::int64_t of_model = model.number_at({"mp_world_size"}).value_or(1);
  if (of_model == static_cast<std::int64_t>(num_model_ranks)) return;
  throw Error::expected(ErrorKind::corruption, {.path = folder}, "files of ranks",
                        "model states of " + std::to_string(of_model) +
                            " mp_ranks, as mp_world_size of " + model.name() + " says",
                        "model states of " + std::to_string(num_model_ranks),
                        "not copied from all hosts?");
}

/// Checks that both ranks' configurations have the same stage of ZeRO, if both record one.
void require_equal_stage(const File& first, const File& other) {
  const Path path{"ds_config", "zero_optimization", "stage"};
  const auto expected = first.value_at(path);
  const auto found = other.value_at(path);
  if (expected && found && *expected != *found) require_equal(first, other, path);
}

void require_no_experts(const File& optimizer) {
  if (optimizer.below({"optimizer_state_dict", "ds_zero_partition_groups"}).empty()) return;
  throw Error::expected(ErrorKind::unsupported, {.path = optimizer.reader().path()}, "parallelism",
                        "only files of ZeRO", "a file of expert parallelism");
}

/// Returns the number in an entry: an integer, or a scalar of float32, as torch.optim counts steps.
std::optional<std::int64_t> step_at(const File& file, const Entry& entry) {
  if (entry.kind == Entry::Kind::value) return file.number_at(entry.path);
  const TensorMeta& meta = file.tensor(entry);
  if (!meta.shape.empty() || meta.dtype != DType::float32) return std::nullopt;
  float step = 0;
  const std::vector<std::byte> bytes = scalar(file, entry);
  std::memcpy(&step, bytes.data(), sizeof step);
  constexpr float kMax = 1e15F;  // also refuses NaN
  if (!(step >= 0 && step < kMax)) return std::nullopt;
  return static_cast<std::int64_t>(step);
}

}  // namespace

std::optional<DifferingSteps> differing_steps(const File& model, const File& optimizer, int stage) {
  const auto steps = model.number_at({"global_steps"});
  std::optional<std::int64_t> of_optimizer;
  for (const Entry* const entry : optimizer.below(path_of_state(optimizer, stage))) {
    if (entry->path.back() != "step") continue;
    const auto step = step_at(optimizer, *entry);
    if (step) of_optimizer = std::max(of_optimizer.value_or(0), *step);
  }
  if (!steps || !of_optimizer) return std::nullopt;
  const std::int64_t of_model = *steps - model.number_at({"skipped_steps"}).value_or(0);
  if (of_model == *of_optimizer) return std::nullopt;
  return DifferingSteps{.expected = "optimizer state after " + std::to_string(of_model) +
                                    " steps, as " + model.name() + " counts",
                        .found = std::to_string(*of_optimizer) + " steps in " + optimizer.name() +
                                 " (files of two saves, or a run that began without the "
                                 "optimizer's state?)"};
}

void require_one_save(const std::string& folder, const std::vector<const File*>& model,
                      const std::vector<const File*>& optimizer, int stage,
                      std::size_t num_model_ranks) {
  const File& first_model = *model.front();
  for (const File* const file : model) {
    require_world_sizes(folder, *file, optimizer.size(), num_model_ranks);
    require_equal(first_model, *file, {"ds_version"});
    require_equal(first_model, *file, {"global_steps"});
    require_equal_below(first_model, *file, {"param_shapes"});
    require_equal_below(first_model, *file, {"frozen_param_shapes"});
  }
  const File& first = *optimizer.front();
  Path groups = path_of_optimizer(stage);
  groups.emplace_back("param_groups");
  for (const File* const file : optimizer) {
    require_no_experts(*file);
    require_partition_count(*file, optimizer.size());
    require_equal(first_model, *file, {"ds_version"});
    require_state_of_vectors(*file, stage);
    if (file == &first) continue;
    require_equal_stage(first, *file);
    require_equal_below(first, *file, groups);
    require_equal_scalars(first, *file, path_of_state(first, stage));
    require_no_further_state(first, *file, path_of_state(first, stage));
  }
  // A rank writes its configuration into both of its files, so these must agree. The configurations
  // of two ranks may differ.
  for (std::size_t rank = 0; rank < model.size(); ++rank) {
    if (optimizer[rank]->below({"ds_config"}).empty()) continue;
    require_equal_below(*model[rank], *optimizer[rank], {"ds_config"});
  }
}

void require_one_save(const File& first_model, const File& first_optimizer, const File& model,
                      const File& optimizer, int stage) {
  require_equal(first_model, model, {"ds_version"});
  require_equal(first_model, model, {"global_steps"});
  require_equal_below(first_model, model, {"checkpoint_parallel_dimensions"});
  require_equal_stage(first_optimizer, optimizer);
  Path groups = path_of_optimizer(stage);
  groups.emplace_back("param_groups");
  require_equal_below(first_optimizer, optimizer, groups);
  require_equal_scalars(first_optimizer, optimizer, path_of_state(first_optimizer, stage));
}

}  // namespace tessera::formats::deepspeed
