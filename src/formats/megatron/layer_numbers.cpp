#include "formats/megatron/layer_numbers.h"

#include <algorithm>
#include <set>

#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::megatron {

using torch_files::refuse;

LayerNumbers::LayerNumbers(const std::vector<RankModel>& ranks, const RankFolders& folders)
    : folders_(folders) {
  require_equal_ranks(ranks);
  count_layers(ranks);
  count_experts(ranks);
}

/// Checks that the ranks of one stage have tensors of the same names, dtypes and shapes.
void LayerNumbers::require_equal_ranks(const std::vector<RankModel>& ranks) const {
  for (const RankModel& rank : ranks) {
    const RankModel& first = ranks[folders_.index_of({.stage = rank.place.stage})];
    std::map<std::pair<std::size_t, std::string>, const Parameter*> expected;
    for (const Parameter& tensor : first.tensors) {
      const auto key = std::pair(tensor.chunk, tensor.name);
      if (!expected.emplace(key, &tensor).second) {
        refuse(*first.file, tensor.name, "model", "each name once", "this name twice");
      }
    }
    const std::string as_first = ", as in " + first.file->name();
    std::size_t num_found = 0;
    for (const Parameter& tensor : rank.tensors) {
      const auto same = expected.find(std::pair(tensor.chunk, tensor.name));
      if (same == expected.end()) {
        refuse(*rank.file, tensor.name, "parts of ranks", "the same names" + as_first,
               "an additional name");
      }
      const TensorMeta& mine = tensor.meta();
      const TensorMeta& its = same->second->meta();
      if (mine.shape != its.shape || mine.dtype != its.dtype) {
        refuse(*rank.file, tensor.name, "parts of ranks",
               std::string(dtype_name(its.dtype)) + " " + shape_to_string(its.shape) + as_first,
               std::string(dtype_name(mine.dtype)) + " " + shape_to_string(mine.shape));
      }
      ++num_found;
    }
    if (num_found == expected.size() && rank.num_chunks == ranks.front().num_chunks) continue;
    const auto in_words = [](std::size_t num_tensors, std::size_t num_chunks) {
      return counted(num_tensors, "tensor") + " of the model in " + counted(num_chunks, "chunk");
    };
    refuse(*rank.file, {}, "parts of ranks",
           in_words(expected.size(), ranks.front().num_chunks) + as_first,
           in_words(num_found, rank.num_chunks));
  }
}

void LayerNumbers::count_layers(const std::vector<RankModel>& ranks) {
  std::map<std::pair<std::string, ChunkOfStage>, std::set<std::size_t>> numbers;
  for (const RankModel& rank : ranks) {
    if (rank.place.tensor != 0 || rank.place.expert != 0) continue;
    for (const Parameter& tensor : rank.tensors) {
      if (const auto layer = layer_in(tensor.name)) {
        numbers[{layer->before, {tensor.chunk, rank.place.stage}}].insert(layer->number);
      }
    }
  }
  for (const auto& [key, found] : numbers) {
    const auto& [before, at] = key;
    if (*found.rbegin() + 1 != found.size()) {
      const RankModel& rank = ranks[folders_.index_of({.stage = at.second})];
      refuse(*rank.file, before, "layers", "the numbers 0 to " + std::to_string(*found.rbegin()),
             "only " + std::to_string(found.size()) + " of these numbers");
    }
    num_layers_[before][at] = found.size();
  }
}

void LayerNumbers::count_experts(const std::vector<RankModel>& ranks) {
  for (const RankModel& rank : ranks) {
    if (rank.place.tensor != 0 || rank.place.expert != 0) continue;
    for (const Parameter& tensor : rank.tensors) {
      const auto expert = expert_in(tensor.name);
      if (!expert) continue;
      std::size_t& number = num_experts_[{{tensor.chunk, rank.place.stage}, expert->before}];
      number = std::max(number, expert->number + 1);
    }
  }
}

std::string LayerNumbers::name_of(std::size_t rank, std::size_t chunk,
                                  const std::string& name) const {
  const Place place = folders_.place_of(rank);
  std::string whole = name;
  if (const auto expert = expert_in(whole)) {
    const auto found = num_experts_.find({{chunk, place.stage}, expert->before});
    const std::size_t num_here = found == num_experts_.end() ? 0 : found->second;
    whole = expert->with(place.expert * num_here + expert->number);
  }
  const auto layer = layer_in(whole);
  if (!layer) return whole;
  const auto counts = num_layers_.find(layer->before);
  if (counts == num_layers_.end()) return whole;
  std::size_t num_before = 0;
  for (const auto& [at, count] : counts->second) {
    if (at < ChunkOfStage{chunk, place.stage}) num_before += count;
  }
  return layer->with(num_before + layer->number);
}

std::optional<std::size_t> LayerNumbers::num_layers() const {
  std::optional<std::size_t> num_layers;
  for (const auto& [before, counts] : num_layers_) {
    if (before.starts_with("mtp.")) continue;
    if (num_layers) return std::nullopt;
    num_layers = 0;
    for (const auto& [at, count] : counts) *num_layers += count;
  }
  return num_layers;
}

}  // namespace tessera::formats::megatron
