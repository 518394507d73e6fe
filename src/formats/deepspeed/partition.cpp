#include "formats/deepspeed/partition.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

const std::string kRoot = "optimizer_state_dict";
const std::string kWeightsOfStage3 = "fp32_flat_groups";
const std::string kWeightsOfStage12 = "single_partition_of_fp32_groups";
const std::string kSlices = "param_slice_mappings";
constexpr const char* kLikeWeights = "a vector as long as the fp32 weights";

Error refusal(const File& file, const std::string& fqn, const std::string& rule,
              const std::string& expected, const std::string& found) {
  return Error::expected(ErrorKind::corruption, {.path = file.reader().path(), .fqn = fqn}, rule,
                         expected, found, "files of different runs?");
}

std::optional<std::size_t> number_in(const std::string& text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

bool is_vector(const File& file, const Entry* entry) {
  return entry != nullptr && entry->kind == Entry::Kind::tensor &&
         file.tensor(*entry).shape.size() == 1;
}

/// Returns what `entry` is, for a message that expected a vector. `entry`: null if there is none.
std::string found_in_words(const File& file, const Entry* entry) {
  if (entry == nullptr) return "none";
  if (entry->kind != Entry::Kind::tensor) return "an entry that is not a tensor";
  return "a tensor of shape " + shape_to_string(file.tensor(*entry).shape);
}

/// Returns the length of a flat vector.
std::int64_t numel_of_vector(const File& file, int stage, const std::string& vector) {
  std::vector<std::string> path = path_of_weights(stage);
  path.push_back(vector);
  const Entry* const entry = file.find(path);
  const std::string expected = "flat vector " + vector + ", a one-dimensional tensor '" +
                               path[path.size() - 2] + "." + vector + "'";
  if (!is_vector(file, entry)) {
    throw refusal(file, {}, "fp32 weights", expected, found_in_words(file, entry));
  }
  return file.tensor(*entry).numel();
}

/// Checks that a slice does not exceed its vector, and adds the slice to `partition`.
void add_slice(Partition& partition, const File& file, const std::string& fqn, const Slice& slice) {
  const std::int64_t numel = numel_of_vector(file, partition.stage, slice.vector);
  const auto end = checked_add(slice.begin, slice.numel);
  if (slice.begin < 0 || slice.numel < 0 || !end || *end > numel) {
    throw refusal(file, fqn, "slice of a parameter",
                  "a range in a vector of " + std::to_string(numel) + " elements",
                  std::to_string(slice.numel) + " elements from element " +
                      std::to_string(slice.begin) + " on");
  }
  if (slice.numel > 0) partition.slices[fqn].push_back(slice);
}

/// Returns the item of `list` whose index is `vector`, a number as text; null if there is none.
const Value* item_of_vector(const std::optional<Value>& list, const std::string& vector) {
  const auto index = number_in(vector);
  const auto* const items = list ? list->get_if<Value::List>() : nullptr;
  return index && items != nullptr && *index < items->size() ? &(*items)[*index] : nullptr;
}

/// Returns the number of padding elements at the end of a vector; nothing if it is not recorded.
std::optional<std::int64_t> padding_at_end(const File& file, const std::string& vector) {
  const auto paddings = file.value_at({kRoot, "group_paddings"});
  const Value* const padding = item_of_vector(paddings, vector);
  const auto* const number = padding == nullptr ? nullptr : padding->get_if<std::int64_t>();
  return number == nullptr ? std::nullopt : std::optional(*number);
}

/// Returns whether optimizer state with `numel` elements has one for each fp32 weight of a vector,
/// and perhaps for the padding at its end.
bool has_length_of_vector(const File& optimizer, int stage, const std::string& vector,
                          std::int64_t numel) {
  const std::int64_t of_weights = numel_of_vector(optimizer, stage, vector);
  const auto padded = checked_add(of_weights, padding_at_end(optimizer, vector).value_or(0));
  return numel == of_weights || (padded && numel == *padded);
}

/// Returns the number of padding elements after each parameter of a vector (they align the next
/// parameter). Returns an empty list if the vector has no such padding.
std::vector<std::int64_t> paddings_between(const File& file, const std::string& vector) {
  const auto paddings = file.value_at({kRoot, "param_alignment_paddings"});
  const Value* const of_vector = item_of_vector(paddings, vector);
  const auto* const items = of_vector == nullptr ? nullptr : of_vector->get_if<Value::List>();
  std::vector<std::int64_t> numbers;
  for (const Value& item : items == nullptr ? Value::List() : *items) {
    const auto* const number = item.get_if<std::int64_t>();
    if (number == nullptr || *number < 0) {
      throw refusal(file, {}, "padding", "a number of elements", value_to_string(item));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

/// The flat vectors of one parameter group, joined in the order of the ranks.
class JoinedVectors {
 public:
  JoinedVectors(const std::vector<const File*>& optimizer, int stage, std::string vector)
      : vector_(std::move(vector)) {
    for (const File* const each : optimizer) {
      const File& file = *each;
      begins_.push_back(end_);
      const auto end = checked_add(end_, numel_of_vector(file, stage, vector_));
      if (!end) throw refusal(file, {}, "fp32 weights", "fewer than 2^63 elements", "2^63 or more");
      end_ = *end;
      end_padding_ =
          checked_add(end_padding_, padding_at_end(file, vector_).value_or(0)).value_or(0);
    }
  }

  /// Adds the slices of a parameter to `partition`: the next elements of the vectors.
  void take(Partition& partition, const File& model, const Parameter& parameter) {
    const std::int64_t numel = numel_of(parameter.shape);
    if (numel > end_ - next_) {
      throw refusal(model, parameter.fqn, "parts of ranks",
                    std::to_string(numel) + " elements, for " + shape_to_string(parameter.shape),
                    std::to_string(end_ - next_) + " elements left in vector " + vector_);
    }
    const std::int64_t end = next_ + numel;
    for (std::size_t rank = 0; rank < begins_.size(); ++rank) {
      const std::int64_t end_of_rank = rank + 1 < begins_.size() ? begins_[rank + 1] : end_;
      const std::int64_t last = std::min(end, end_of_rank);
      if (last <= next_) continue;
      partition.slices[parameter.fqn].push_back(
          {rank, vector_, next_ - begins_[rank], last - next_});
      next_ = last;
    }
  }

  void skip(const File& model, std::int64_t padding) {
    if (padding > end_ - next_) {
      throw refusal(model, {}, "padding",
                    std::to_string(padding) + " elements in vector " + vector_,
                    std::to_string(end_ - next_));
    }
    next_ += padding;
  }

  /// Checks that nothing but padding is left.
  void finish(const File& model) const {
    const std::int64_t left = end_ - next_;
    if (left == 0 || left == end_padding_) return;
    throw refusal(model, {}, "padding",
                  "0 or " + std::to_string(end_padding_) +
                      " elements after the last parameter of vector " + vector_,
                  std::to_string(left));
  }

 private:
  std::string vector_;
  std::vector<std::int64_t> begins_;  // by rank
  std::int64_t end_ = 0;
  std::int64_t end_padding_ = 0;
  std::int64_t next_ = 0;
};

/// Cuts the vectors of stages 1 and 2 into parameters, in the order of `partition.parameters`. The
/// slices that DeepSpeed records are not used here: they are wrong with round_robin_gradients.
void cut_in_order(Partition& partition, const File& model,
                  const std::vector<const File*>& optimizer) {
  auto next = partition.parameters.begin();
  while (next != partition.parameters.end()) {
    const std::string vector = next->vector;
    JoinedVectors vectors(optimizer, partition.stage, vector);
    const std::vector<std::int64_t> paddings = paddings_between(*optimizer.front(), vector);
    for (std::size_t i = 0; next != partition.parameters.end() && next->vector == vector; ++i) {
      vectors.take(partition, model, *next++);
      if (i < paddings.size()) vectors.skip(model, paddings[i]);
    }
    vectors.finish(model);
  }
  const std::vector<std::string> weights = path_of_weights(partition.stage);
  std::set<std::string> others;  // vectors without a parameter
  for (const File* const file : optimizer) {
    for (const Entry* const entry : file->below(weights)) {
      const std::string& vector = entry->path[weights.size()];
      const auto of_vector = std::ranges::find(partition.parameters, vector, &Parameter::vector);
      if (of_vector == partition.parameters.end()) others.insert(vector);
    }
  }
  for (const std::string& vector : others) {
    JoinedVectors(optimizer, partition.stage, vector).finish(model);
  }
}

std::int64_t number_of_slice(const File& file, const std::vector<std::string>& path,
                             const std::string& member) {
  std::vector<std::string> whole = path;
  whole.push_back(member);
  if (const auto number = file.number_at(whole)) return *number;
  throw refusal(file, path.back(), "slice of a parameter", "the number '" + member + "'", "none");
}

const Slice* slice_of_rank(const std::vector<Slice>& slices, std::size_t rank) {
  const auto found = std::ranges::find(slices, rank, &Slice::rank);
  return found == slices.end() ? nullptr : &*found;
}

std::string in_words(const Slice& slice) {
  return "elements " + std::to_string(slice.begin) + " to " +
         std::to_string(slice.begin + slice.numel) + " of vector " + slice.vector;
}

/// Checks that the slices that a rank records equal those of the rank in `partition`.
void check_slices(const Partition& partition, const File& file, std::size_t rank) {
  std::size_t num_recorded = 0;
  std::size_t num_slices = 0;
  for (const Entry* const entry : file.below({kRoot, kSlices})) {
    if (entry->path.size() != 5 || entry->path.back() != "numel") continue;
    const std::vector<std::string> path(entry->path.begin(), entry->path.end() - 1);
    const std::int64_t begin = number_of_slice(file, path, "start");
    const std::int64_t numel = number_of_slice(file, path, "numel");
    if (numel == 0) continue;
    ++num_recorded;
    const auto slices = partition.slices.find(path.back());
    const Slice* const slice =
        slices == partition.slices.end() ? nullptr : slice_of_rank(slices->second, rank);
    if (slice != nullptr && slice->vector == path[2] && slice->begin == begin &&
        slice->numel == numel) {
      continue;
    }
    throw refusal(file, path.back(), "slice of a parameter",
                  slice == nullptr ? "no elements on this rank" : in_words(*slice),
                  std::to_string(numel) + " elements from " + std::to_string(begin) +
                      " on in vector " + path[2]);
  }
  for (const auto& [fqn, slices] : partition.slices) {
    num_slices += static_cast<std::size_t>(std::ranges::count(slices, rank, &Slice::rank));
  }
  if (num_recorded == num_slices) return;
  throw refusal(file, {}, kSlices, "slices of " + std::to_string(num_slices) + " parameters",
                "slices of " + std::to_string(num_recorded));
}

/// Returns whether the run shuffled the parameters of stages 1 and 2 (round_robin_gradients).
/// DeepSpeed (seen in 0.19.8) then records slices for the order without shuffling, which is wrong.
bool is_shuffled(const File& model) {
  const auto shuffled = model.value_at({"ds_config", "zero_optimization", "round_robin_gradients"});
  return shuffled && *shuffled == Value(true);
}

/// Computes the slices of one rank in stage 3. The parameters' parts, none of them split, must fill
/// each vector exactly, one after another. Throws if a part is larger than what is left of one.
void cut_equally(Partition& partition, const File& file, std::size_t rank, std::size_t num_ranks) {
  const auto ranks = static_cast<std::int64_t>(num_ranks);
  std::size_t vector = 0;
  std::int64_t begin = 0;
  std::int64_t left = numel_of_vector(file, partition.stage, "0");
  for (Parameter& parameter : partition.parameters) {
    const std::int64_t numel = numel_of(parameter.shape);
    const std::int64_t part = numel / ranks + (numel % ranks != 0 ? 1 : 0);
    while (part > left && left == 0) {
      left = numel_of_vector(file, partition.stage, std::to_string(++vector));
      begin = 0;
    }
    if (part > left) {
      throw refusal(
          file, parameter.fqn, "fp32 weights",
          std::to_string(part) + " elements of this parameter in vector " + std::to_string(vector),
          "only " + std::to_string(left) + " further elements");
    }
    parameter.vector = std::to_string(vector);
    const std::int64_t first = std::min(part * static_cast<std::int64_t>(rank), numel);
    add_slice(partition, file, parameter.fqn,
              {rank, parameter.vector, begin, std::min(part, numel - first)});
    begin += part;
    left -= part;
  }
  const std::size_t num_vectors = file.below(path_of_weights(partition.stage)).size();
  while (++vector < num_vectors) {
    left += numel_of_vector(file, partition.stage, std::to_string(vector));
  }
  if (left == 0) return;
  throw refusal(file, partition.parameters.back().fqn, "fp32 weights",
                "vectors that end with this parameter", std::to_string(left) + " further elements");
}

/// Returns the parameters in the order in which the ranks recorded their slices.
std::vector<Parameter> recorded_parameters(const File& model,
                                           const std::vector<const File*>& optimizer,
                                           const ShapeInModule& shape_in_module) {
  std::map<std::size_t, std::vector<std::string>> names;              // by vector
  std::map<std::string, std::pair<std::size_t, std::int64_t>> found;  // vector, elements
  for (const File* const file : optimizer) {
    for (const Entry* const entry : file->below({kRoot, kSlices})) {
      if (entry->path.size() != 5 || entry->path.back() != "numel") continue;
      const std::string& name = entry->path[3];
      const auto vector = number_in(entry->path[2]);
      const std::int64_t numel = file->number_at(entry->path).value_or(-1);
      const auto [first, is_new] = found.try_emplace(name, vector.value_or(0), std::int64_t{0});
      auto& [of_first, sum] = first->second;
      const auto next = checked_add(sum, numel);
      if (!vector || *vector != of_first || numel < 0 || !next) {
        throw refusal(*file, name, "slice of a parameter",
                      "a number of elements, in the same vector on all ranks",
                      "no such number, or another vector than on an earlier rank");
      }
      sum = *next;
      if (is_new) names[*vector].push_back(name);
    }
  }
  std::vector<Parameter> parameters;
  for (const auto& [vector, of_vector] : names) {
    for (const std::string& name : of_vector) {
      const std::int64_t numel = found[name].second;
      const auto shape = shape_in_module(name, numel);
      if (!shape || checked_numel(*shape) != numel) {
        throw refusal(model, name, "parts of ranks",
                      "a parameter of " + std::to_string(numel) + " elements in the module",
                      shape ? shape_to_string(*shape) : "none");
      }
      parameters.push_back({name, *shape, std::to_string(vector)});
    }
  }
  return parameters;
}

}  // namespace

std::optional<Shape> shape_in(const Value& value) {
  const auto* const tuple = value.get_if<Value::Tuple>();
  if (tuple == nullptr) return std::nullopt;
  Shape shape;
  for (const Value& item : tuple->items) {
    const auto* const size = item.get_if<std::int64_t>();
    if (size == nullptr || *size < 0) return std::nullopt;
    shape.push_back(*size);
  }
  return checked_numel(shape) ? std::optional(shape) : std::nullopt;
}

std::vector<Parameter> read_parameters(const File& model) {
  std::vector<std::pair<std::size_t, Parameter>> parameters;  // with the number of the group
  for (const Entry* const entry : model.below({"param_shapes"})) {
    const auto group = number_in(entry->path[1]);
    const auto value = model.value_of(*entry);
    const auto* const dict = value ? value->get_if<Value::Dict>() : nullptr;
    if (group && entry->path.size() == 2 && dict != nullptr && dict->empty()) continue;
    const auto shape = value && entry->path.size() == 3 ? shape_in(*value) : std::nullopt;
    if (!group || !shape) {
      throw refusal(model, entry->path.back(), "param_shapes", "a dict of shapes by name",
                    "another kind of value");
    }
    parameters.push_back({*group, {entry->path[2], *shape, std::to_string(*group)}});
  }
  if (parameters.empty()) {
    throw refusal(model, {}, "param_shapes", "the shapes of the parameters", "none");
  }
  std::ranges::stable_sort(parameters, {}, [](const auto& parameter) { return parameter.first; });
  std::vector<Parameter> in_order;
  for (auto& [group, parameter] : parameters) in_order.push_back(std::move(parameter));
  return in_order;
}

bool lists_parameters(const File& model) {
  return !model.below({"param_shapes"}).empty();
}

InVector vector_at(const File& file, const Partition& partition,
                   const std::vector<std::string>& path, const Slice& slice, const std::string& fqn,
                   VectorForm form) {
  const Entry* const vector = file.find(path);
  const std::int64_t begin =
      form == VectorForm::whole_parameters ? slice.begin_in_whole : slice.begin;
  if (is_vector(file, vector)) {
    const std::int64_t numel = file.tensor(*vector).numel();
    const bool is_whole = form == VectorForm::whole_parameters ||
                          has_length_of_vector(file, partition.stage, slice.vector, numel);
    if (is_whole && numel >= begin + slice.numel) return {vector->index, begin};
  }
  throw refusal(file, fqn, "parts of ranks", kLikeWeights, found_in_words(file, vector));
}

std::variant<VectorForm, Error> form_of_state(const Partition& partition,
                                              const std::vector<const File*>& optimizer,
                                              const Slice& slice,
                                              const std::vector<std::string>& name,
                                              const std::string& fqn) {
  const auto& numels = partition.whole_numel.at(slice.vector);
  const auto path_in = [&](const File& file) {
    return path_in_state(file, partition.stage, slice.vector, name);
  };
  const auto length_on = [&](std::size_t rank) -> std::optional<std::int64_t> {
    const File& file = *optimizer[rank];
    const Entry* const state = file.find(path_in(file));
    return is_vector(file, state) ? std::optional(file.tensor(*state).numel()) : std::nullopt;
  };
  const auto is_like_weights = [&](const auto& of_rank) {
    const auto numel = length_on(of_rank.first);
    return numel &&
           has_length_of_vector(*optimizer[of_rank.first], partition.stage, slice.vector, *numel);
  };
  const auto is_whole = [&](const auto& of_rank) {
    return length_on(of_rank.first) == of_rank.second;
  };
  // One rank can have the length of both forms. All ranks have it only if no parameter is cut
  // between ranks, and then the forms are the same.
  const auto other = std::ranges::find_if_not(numels, is_like_weights);
  if (other == numels.end()) return VectorForm::like_weights;
  if (partition.stage != 3 && std::ranges::all_of(numels, is_whole)) {
    return VectorForm::whole_parameters;
  }
  const bool is_of_some = std::ranges::any_of(numels, is_like_weights);
  const File& file = *optimizer[other->first];
  return Error::expected(
      is_of_some ? ErrorKind::corruption : ErrorKind::unsupported,
      {.path = file.reader().path(), .fqn = fqn}, is_of_some ? "parts of ranks" : "state",
      kLikeWeights, found_in_words(file, file.find(path_in(file))),
      is_of_some ? "files of different runs?" : "an optimizer with 8-bit state?");
}

const std::vector<Slice>& Partition::slices_of(const Parameter& parameter) const {
  static const std::vector<Slice> kNone;
  const auto found = slices.find(parameter.fqn);
  return found == slices.end() ? kNone : found->second;
}

std::vector<Run> runs_of_weights(const Partition& partition, const Parameter& parameter,
                                 const std::vector<const File*>& optimizer) {
  std::vector<Run> runs;
  for (const Slice& slice : partition.slices_of(parameter)) {
    const File& file = *optimizer[slice.rank];
    std::vector<std::string> path = path_of_weights(partition.stage);
    path.push_back(slice.vector);
    const InVector at = vector_at(file, partition, path, slice, parameter.fqn);
    runs.push_back({&file.reader(), at.tensor, at.begin, slice.numel});
  }
  return runs;
}

std::vector<std::string> path_of_weights(int stage) {
  return {kRoot, stage == 3 ? kWeightsOfStage3 : kWeightsOfStage12};
}

std::vector<std::string> path_of_optimizer(int stage) {
  return {kRoot, stage == 3 ? kRoot : std::string("base_optimizer_state")};
}

std::vector<std::string> path_of_state(const File& optimizer, int stage) {
  std::vector<std::string> path = path_of_optimizer(stage);
  path.emplace_back("state");
  if (optimizer.below(path).empty()) path.pop_back();  // older versions: a list of states
  return path;
}

std::vector<std::string> path_in_state(const File& optimizer, int stage, const std::string& vector,
                                       const std::vector<std::string>& name) {
  std::vector<std::string> path = path_of_state(optimizer, stage);
  path.push_back(vector);
  path.insert(path.end(), name.begin(), name.end());
  return path;
}

int stage_of(const File& optimizer) {
  if (!optimizer.below({kRoot, kWeightsOfStage3}).empty()) return 3;
  if (!optimizer.below({kRoot, kWeightsOfStage12}).empty()) return 2;
  throw Error::expected(ErrorKind::unsupported, {.path = optimizer.reader().path()},
                        "optimizer states", "the flat fp32 weights of ZeRO stage 1, 2 or 3",
                        "none");
}

namespace {

/// Sets `whole_numel`, and `begin_in_whole` of all slices. Each parameter of a rank counts as a
/// whole, in the order of the parameters in the vector.
void set_wholes(Partition& partition) {
  for (const Parameter& parameter : partition.parameters) {
    const auto slices = partition.slices.find(parameter.fqn);
    if (slices == partition.slices.end()) continue;
    std::int64_t begin = 0;  // of the slice in the parameter
    for (Slice& slice : slices->second) {
      std::int64_t& whole = partition.whole_numel[slice.vector][slice.rank];
      slice.begin_in_whole = whole + begin;
      whole += numel_of(parameter.shape);
      begin += slice.numel;
    }
  }
}

Partition cut_partition(const File& model, const std::vector<const File*>& optimizer, int stage,
                        const ShapeInModule& shape_in_module) {
  Partition partition;
  partition.stage = stage;
  const bool has_slices = !optimizer.front()->below({kRoot, kSlices}).empty();
  partition.parameters = lists_parameters(model) || stage == 3 || !has_slices
                             ? read_parameters(model)
                             : recorded_parameters(model, optimizer, shape_in_module);
  if (stage == 3) {
    for (std::size_t rank = 0; rank < optimizer.size(); ++rank) {
      cut_equally(partition, *optimizer[rank], rank, optimizer.size());
    }
    return partition;
  }
  cut_in_order(partition, model, optimizer);
  for (std::size_t rank = 0; rank < optimizer.size(); ++rank) {
    const bool records = !optimizer[rank]->below({kRoot, kSlices}).empty();
    if (records && !is_shuffled(model)) check_slices(partition, *optimizer[rank], rank);
  }
  return partition;
}

}  // namespace

Partition read_partition(const File& model, const std::vector<const File*>& optimizer, int stage,
                         const ShapeInModule& shape_in_module) {
  Partition partition = cut_partition(model, optimizer, stage, shape_in_module);
  set_wholes(partition);
  return partition;
}

std::vector<std::string> in_group_order(std::vector<std::string> names, const File& model,
                                        int stage, std::size_t num_ranks) {
  if (stage == 3 || !is_shuffled(model)) return names;
  std::vector<std::string> in_order(names.size());
  auto next = names.begin();
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    for (std::size_t i = rank; i < in_order.size(); i += num_ranks, ++next) {
      in_order[i] = std::move(*next);
    }
  }
  return in_order;
}

}  // namespace tessera::formats::deepspeed
