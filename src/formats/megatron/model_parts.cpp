#include "formats/megatron/model_parts.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <unordered_map>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::megatron {

using torch_files::refuse;

namespace {

constexpr std::string_view kModelMember = "model";
constexpr std::size_t kMaxChunks = 1024;

}  // namespace

std::optional<std::size_t> chunk_number(std::string_view member) {
  if (!member.starts_with(kModelMember)) return std::nullopt;
  member.remove_prefix(kModelMember.size());
  if (member.empty()) return 0;
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(member.data(), member.data() + member.size(), number);
  if (error != std::errc{} || end != member.data() + member.size() || number >= kMaxChunks) {
    return std::nullopt;
  }
  return number;
}

std::string name_on_rank(const Path& path) {
  std::string name;
  for (std::size_t i = 1; i < path.size(); ++i) name += (i > 1 ? "." : "") + path[i];
  return name;
}

bool is_extra_state(const Path& path) {
  return std::ranges::any_of(path,
                             [](const std::string& key) { return key.ends_with(kExtraState); });
}

RankModel read_rank_model(const File& file, const Place& place) {
  RankModel model{.file = &file, .place = place, .num_chunks = 0, .tensors = {}};
  std::unordered_map<std::string, std::size_t> order;  // of the tensors in the pickle
  for (const auto& names : file.reader().dict_orders()) {
    for (const std::string& name : names) order.emplace(name, order.size());
  }
  std::vector<std::pair<std::size_t, Parameter>> found;
  for (const Entry& entry : file.entries()) {
    const auto chunk = chunk_number(entry.path.front());
    if (!chunk) continue;
    model.num_chunks = std::max(model.num_chunks, *chunk + 1);
    if (entry.kind != Entry::Kind::tensor || entry.path.size() < 2) continue;
    if (is_extra_state(entry.path)) continue;
    const auto place_in_pickle = order.find(spell(entry.keys));
    found.push_back({place_in_pickle == order.end() ? order.size() : place_in_pickle->second,
                     {*chunk, name_on_rank(entry.path), &file, &entry}});
  }
  if (model.num_chunks == 0) refuse(file, {}, "model", "the member 'model' or 'model0'", "none");
  std::ranges::stable_sort(
      found, {}, [](const auto& each) { return std::pair(each.second.chunk, each.first); });
  for (auto& [place_in_pickle, tensor] : found) model.tensors.push_back(std::move(tensor));
  return model;
}

WholeNames::WholeNames(const std::vector<RankModel>& ranks, const RankFolders& folders)
    : folders_(folders) {
  require_equal_ranks(ranks);
  count_layers(ranks);
  count_experts(ranks);
}

/// Checks that the ranks of one stage have tensors of the same names, dtypes and shapes.
void WholeNames::require_equal_ranks(const std::vector<RankModel>& ranks) const {
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

void WholeNames::count_layers(const std::vector<RankModel>& ranks) {
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

void WholeNames::count_experts(const std::vector<RankModel>& ranks) {
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

std::string WholeNames::name_of(std::size_t rank, std::size_t chunk,
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

std::optional<std::size_t> WholeNames::num_layers() const {
  std::optional<std::size_t> num_layers;
  for (const auto& [before, counts] : num_layers_) {
    if (before.starts_with("mtp.")) continue;
    if (num_layers) return std::nullopt;
    num_layers = 0;
    for (const auto& [at, count] : counts) *num_layers += count;
  }
  return num_layers;
}

std::optional<Joint> join(Cut cut, bool is_gated, std::size_t num_parts, const Shape& part) {
  Joint joint{cut, is_gated, num_parts, part, part};
  if (cut == Cut::whole) return joint;
  const std::size_t dimension = cut == Cut::first_dimension ? 0 : 1;
  if (part.size() <= dimension || (is_gated && part[0] % 2 != 0)) return std::nullopt;
  const auto size = checked_mul(part[dimension], static_cast<std::int64_t>(num_parts));
  if (!size) return std::nullopt;
  joint.whole[dimension] = *size;
  if (!checked_numel(joint.whole)) return std::nullopt;
  return joint;
}

std::vector<Joint::Piece> Joint::pieces_of(std::size_t tensor_rank) const {
  if (cut == Cut::whole) return {{whole_box(whole), 0}};
  const std::size_t dimension = cut == Cut::first_dimension ? 0 : 1;
  const auto rank = static_cast<std::int64_t>(tensor_rank);
  Box box{Shape(part.size(), 0), part};
  if (!is_gated) {
    box.offsets[dimension] = rank * part[dimension];
    return {{std::move(box), 0}};
  }
  const std::int64_t num_rows = part[0] / 2;
  box.sizes[0] = num_rows;
  std::vector<Piece> pieces(2, {box, 0});
  pieces[0].region.offsets[0] = rank * num_rows;
  pieces[1].region.offsets[0] = whole[0] / 2 + rank * num_rows;
  pieces[1].begin = box.numel();
  return pieces;
}

}  // namespace tessera::formats::megatron
