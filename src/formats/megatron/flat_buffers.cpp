#include "formats/megatron/flat_buffers.h"

#include <algorithm>
#include <charconv>

#include "base/checked_math.h"
#include "formats/megatron/same_numbers.h"

namespace tessera::formats::megatron {
namespace {

constexpr std::int64_t kAlignment = 64;
// The bucket size of Megatron's DistributedDataParallel, if the run's arguments state none: the
// larger of 40 million elements and 1 million per data-parallel rank.
constexpr std::int64_t kBucketNumel = 40'000'000;
constexpr std::int64_t kBucketNumelPerRank = 1'000'000;

const std::string kWeights = "param";

/// Whether two pipeline stages may share the parameter: embeddings, whose weight the output layer
/// may share.
bool is_shared(const Parameter& parameter) {
  return parameter.name == "embedding.word_embeddings.weight" ||
         parameter.name == "output_layer.weight";
}

/// The bucket that is being filled: where it begins in the vector, and its number of elements so
/// far.
struct Bucket {
  std::int64_t begin = 0;
  std::int64_t numel = 0;

  bool close() {
    const auto end = checked_add(begin, numel);
    if (!end) return false;
    begin = *end;
    numel = 0;
    return true;
  }
};

}  // namespace

std::optional<std::vector<std::int64_t>> places_in_buffer(
    const std::vector<const Parameter*>& parameters, const BufferRules& rules) {
  constexpr std::int64_t kMax = std::int64_t{1} << 60;
  std::vector<std::int64_t> places(parameters.size() + 1);
  Bucket bucket;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const bool is_alone = rules.has_own_bucket_for_shared && is_shared(*parameters[i]);
    bucket.numel = round_up(bucket.numel, kAlignment);
    if (is_alone && bucket.numel > 0 && !bucket.close()) return std::nullopt;
    const auto place = checked_add(bucket.begin, bucket.numel);
    const auto end = checked_add(bucket.numel, parameters[i]->meta().numel());
    if (!place || !end || *place > kMax || *end > kMax) return std::nullopt;
    places[i] = *place;
    bucket.numel = *end;
    const bool is_full = rules.bucket_numel && bucket.numel >= *rules.bucket_numel;
    if ((is_full || is_alone) && !bucket.close()) return std::nullopt;
  }
  if (!bucket.close()) return std::nullopt;
  places.back() = bucket.begin;
  return places;
}

FlatBuffers::FlatBuffers(const File& vectors, Path root, const File& model)
    : file_(vectors), root_(std::move(root)), model_(model) {
  bool has_number = false;
  const std::size_t depth = root_.size();
  const auto is_below = [&](const Entry& entry) {
    return entry.path.size() > depth && std::equal(root_.begin(), root_.end(), entry.path.begin());
  };
  for (const Entry& entry : file_.entries()) {
    // The path of a vector: <number of the buffer>, <dtypes of the buffer>, <name of the vector>
    if (!is_below(entry) || entry.kind != Entry::Kind::tensor) continue;
    const std::string& text = entry.path[depth];
    std::size_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool is_number = error == std::errc{} && end == text.data() + text.size();
    has_number = has_number || is_number;
    Buffer& buffer = buffers_[is_number ? number : 0];
    const bool is_vector =
        is_number && entry.path.size() == depth + 3 && file_.tensor(entry).shape.size() == 1;
    if (!is_vector || !buffer.vectors.emplace(entry.path.back(), &entry).second) {
      problem_ = "the vectors are not as Megatron core 0.16 saves them";
    }
  }
  // All versions of Megatron number their buffers.
  if (are_there() && !has_number) {
    problem_ = "no vectors of the distributed optimizer are in " + file_.name() +
               " (was another file copied to this name?)";
    is_damaged_ = true;
  }
}

/// Checks that all vectors of a buffer have the same length, and that the fp32 weights are there.
/// Returns false and sets `problem_` if not.
bool FlatBuffers::check(Buffer& buffer, std::size_t number) {
  const auto weights = buffer.vectors.find(kWeights);
  if (weights == buffer.vectors.end()) {
    problem_ = "buffer " + std::to_string(number) + " has no fp32 weights";
    return false;
  }
  buffer.numel = file_.tensor(*weights->second).numel();
  for (const auto& [name, entry] : buffer.vectors) {
    if (file_.tensor(*entry).numel() == buffer.numel) continue;
    problem_ = name + " of buffer " + std::to_string(number) + " has " +
               std::to_string(file_.tensor(*entry).numel()) + " elements, the fp32 weights have " +
               std::to_string(buffer.numel);
    is_damaged_ = true;
    return false;
  }
  return true;
}

std::vector<PartState> FlatBuffers::find(const std::vector<const Parameter*>& parameters) {
  std::vector<PartState> parts(parameters.size());
  if (!problem_.empty()) return parts;
  // There is one buffer for each pair of a model chunk and a dtype, in the order in which the pairs
  // first occur.
  std::vector<std::pair<std::size_t, DType>> keys;
  std::map<std::pair<std::size_t, DType>, std::vector<std::size_t>> of_key;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::pair key{parameters[i]->chunk, parameters[i]->meta().dtype};
    if (of_key[key].empty()) keys.push_back(key);
    of_key[key].push_back(i);
  }
  if (keys.size() != buffers_.size()) {
    problem_ = "expected " + std::to_string(keys.size()) + " buffers, found " +
               std::to_string(buffers_.size());
    return parts;
  }
  auto next = keys.begin();
  for (auto& [number, buffer] : buffers_) {
    std::vector<const Parameter*> inside;
    for (const std::size_t i : of_key[*next]) inside.push_back(parameters[i]);
    std::vector<PartState> found(inside.size());
    if (!check(buffer, number) || !place(buffer, number, inside, found)) return parts;
    for (std::size_t i = 0; i < found.size(); ++i) parts[of_key[*next][i]] = std::move(found[i]);
    ++next;
  }
  return parts;
}

/// Returns the rules by which the run may have filled its buffers. The files do not say which rules
/// it used. `place` tries each: the rules must give the vector's length, and the numbers at the
/// resulting places must equal the model's.
std::vector<BufferRules> FlatBuffers::possible_rules() const {
  std::vector<std::optional<std::int64_t>> sizes{std::nullopt};
  if (const auto stated = model_.number_at({"args", "ddp_bucket_size"})) {
    if (*stated > 0) sizes.emplace_back(*stated);
  }
  const std::int64_t ranks = model_.number_at({"args", "data_parallel_size"}).value_or(1);
  const auto of_ranks = checked_mul(kBucketNumelPerRank, ranks);
  sizes.emplace_back(std::max(kBucketNumel, of_ranks.value_or(0)));
  std::vector<BufferRules> rules;
  for (const auto& size : sizes) {
    rules.push_back({size, false});
    rules.push_back({size, true});
  }
  return rules;
}

/// Finds the place of each parameter in one buffer, and sets `parts`. Returns false and sets
/// `problem_` if no rules fit.
bool FlatBuffers::place(const Buffer& buffer, std::size_t number,
                        const std::vector<const Parameter*>& parameters,
                        std::vector<PartState>& parts) {
  std::set<std::vector<std::int64_t>> tried;
  for (const BufferRules& rules : possible_rules()) {
    auto places = places_in_buffer(parameters, rules);
    if (!places || places->back() != buffer.numel || !tried.insert(*places).second) continue;
    bool is_right = true;
    for (std::size_t i = 0; is_right && i < parameters.size(); ++i) {
      parts[i] = {};
      for (const auto& [name, entry] : buffer.vectors) {
        const Elements elements{&file_, entry->index, (*places)[i]};
        if (name == kWeights) {
          parts[i].weights = elements;
        } else {
          parts[i].tensors.emplace(name, elements);
        }
      }
      is_right = have_same_numbers(*parts[i].weights, *parameters[i]);
    }
    if (is_right) return true;
  }
  is_damaged_ = !tried.empty();
  const auto simple = places_in_buffer(parameters, {});
  problem_ = "no known order of the parameters fits buffer " + std::to_string(number) + " of " +
             std::to_string(buffer.numel) + " elements" +
             (simple && !is_damaged_
                  ? " (in one bucket they would have " + std::to_string(simple->back()) + ")"
                  : ": the fp32 weights differ from the model's");
  return false;
}

}  // namespace tessera::formats::megatron
