#include "formats/megatron/model_parts.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "base/checked_math.h"
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

std::optional<Joint> join(Cut cut, std::int64_t num_matrices, std::size_t num_parts,
                          const Shape& part) {
  Joint joint{cut, num_matrices, num_parts, part, part};
  if (cut == Cut::whole) return joint;
  const std::size_t dimension = cut == Cut::first_dimension ? 0 : 1;
  if (part.size() <= dimension || part[0] % num_matrices != 0) return std::nullopt;
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
  box.sizes[dimension] = part[dimension] / num_matrices;
  std::vector<Piece> pieces;
  for (std::int64_t matrix = 0; matrix < num_matrices; ++matrix) {
    box.offsets[dimension] =
        matrix * (whole[dimension] / num_matrices) + rank * box.sizes[dimension];
    pieces.push_back({box, matrix * box.numel()});
  }
  return pieces;
}

}  // namespace tessera::formats::megatron
