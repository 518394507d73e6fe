#include "formats/rank_files/rank_contents.h"

#include <algorithm>
#include <ranges>
#include <string_view>
#include <utility>

#include "formats/key_paths.h"
#include "formats/numbered_state.h"
#include "formats/per_rank.h"
#include "formats/rank_files/file_names.h"
#include "formats/torch_zip/state_dict_pickle.h"
#include "formats/torch_zip/unwritten_file.h"
#include "tessera/base/error.h"

namespace tessera::formats::rank_files {
namespace {

using torch_zip::TorchSaveLayout;

constexpr std::size_t kExtraState = 2;  // index in kWrittenItems
constexpr std::size_t kOther = 3;

bool is_whole(const TensorEntry& tensor, const Piece& piece) {
  return boxes_of(piece.region, tensor.meta.shape) ==
         std::vector<Box>{whole_box(tensor.meta.shape)};
}

/// Returns the index of the entry with this name in a list that is sorted by name; nothing if there
/// is none.
template <class Entry, class NameOf>
std::optional<std::size_t> find_entry(const std::vector<Entry>& entries, const std::string& name,
                                      const NameOf& name_of) {
  const auto found = std::ranges::lower_bound(entries, name, {}, name_of);
  if (found == entries.end() || name_of(*found) != name) return std::nullopt;
  return static_cast<std::size_t>(found - entries.begin());
}

/// Returns the items in kWrittenItems, such as `model`, that are dicts with entries at the top.
std::set<std::size_t> dicts_of(const CheckpointContents& contents) {
  std::set<std::size_t> dicts;
  const auto look_at = [&](const KeyPath& path) {
    if (path.size() < 2 || !std::holds_alternative<std::string>(path.front())) return;
    const auto found = std::ranges::find(kWrittenItems, std::get<std::string>(path.front()));
    const auto item = static_cast<std::size_t>(found - kWrittenItems.begin());
    if (item < kOther) dicts.insert(item);
  };
  for (const TensorEntry& tensor : contents.tensors) look_at(tensor.key_path);
  for (const Alias& alias : contents.aliases) look_at(alias.key_path);
  for (const ValueEntry& value : contents.values) look_at(value.key_path);
  return dicts;
}

/// Returns the item of an entry: an index in kWrittenItems. An entry with the single key `model.w`
/// belongs to `model`, unless `dicts` has `model`. `first`: the entry's outermost key.
std::size_t item_of(const std::string& name, const Key& first, const std::set<std::size_t>& dicts) {
  const auto* const word = std::get_if<std::string>(&first);
  for (std::size_t item = 0; word != nullptr && item < kOther; ++item) {
    const std::string prefix = std::string(kWrittenItems[item]) + ".";
    if (!name.starts_with(prefix)) continue;
    const bool is_flat = word->starts_with(prefix) && !dicts.contains(item);
    return *word == kWrittenItems[item] || is_flat ? item : kOther;
  }
  return kOther;
}

/// In the files of rank `<rank>`, puts each entry `per_rank.<rank>.<name>` in place of the shared
/// entry `<name>`. Does this only if `may(own, shared, rank)` returns true, and
/// not for the names in `apart`.
template <class Spot, class Entry, class NameOf, class May>
void place_own_entries(std::vector<Spot>& spots, const std::vector<Entry>& entries,
                       const NameOf& name_of, int world_size, const std::set<std::string>& apart,
                       const May& may) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto own = parse_per_rank_name(name_of(entries[i]));
    if (!own || own->rank >= world_size || apart.contains(name_of(entries[i]))) continue;
    const auto shared = find_entry(entries, own->name, name_of);
    if (!shared || spots[*shared].only_on || !may(i, *shared, own->rank)) continue;
    Spot spot = spots[*shared];
    spot.only_on = own->rank;
    spot.not_on.clear();
    spots[i] = std::move(spot);
    spots[*shared].not_on.insert(own->rank);
  }
}

/// Returns the index of the tensor that an alias names.
std::size_t target_of(const CheckpointContents& contents, const Alias& alias) {
  const TensorEntry* const target = contents.find_tensor(alias.target);
  TESSERA_CHECK(target != nullptr);
  return static_cast<std::size_t>(target - contents.tensors.data());
}

/// Finds the spots of entries. `files`: whether `model` and the like have files of their own.
class SpotFinder {
 public:
  enum class Files { by_item, one };

  SpotFinder(const CheckpointContents& contents, Files files)
      : contents_(contents),
        files_(files),
        dicts_(dicts_of(contents)),
        apart_(find_own_entries_apart(contents)) {}

  Spots find() const {
    Spots spots;
    spots.tensors = spots_of_tensors();
    for (const Alias& alias : contents_.aliases) {
      spots.aliases.push_back(spot_of(alias.fqn, alias.key_path, alias.dict_order));
    }
    spots.values = spots_of_values();
    return spots;
  }

 private:
  Spot spot_of(const std::string& name, const KeyPath& path, std::uint32_t dict_order) const {
    KeyPath whole = path.empty() ? KeyPath{name} : path;
    const std::size_t item = files_ == Files::one ? kOther : item_of(name, whole.front(), dicts_);
    if (item == kOther) return {kOther, name, std::move(whole), dict_order};
    const std::size_t prefix_nbytes = kWrittenItems[item].size() + 1;
    const auto& first = std::get<std::string>(whole.front());
    if (first == kWrittenItems[item]) {
      whole.erase(whole.begin());
    } else {
      whole.front() = first.substr(prefix_nbytes);
    }
    return {item, name.substr(prefix_nbytes), std::move(whole), dict_order};
  }

  std::vector<Spot> spots_of_tensors() const {
    std::vector<Spot> spots;
    for (const TensorEntry& tensor : contents_.tensors) {
      spots.push_back(spot_of(tensor.meta.fqn, tensor.key_path, tensor.dict_order));
    }
    const auto name_of = [](const TensorEntry& entry) -> const std::string& {
      return entry.meta.fqn;
    };
    const auto agree = [&](std::size_t own, std::size_t shared, int rank) {
      const auto is_of_rank = [&](const Piece& piece) { return piece.rank == rank; };
      return std::ranges::all_of(contents_.tensors[own].pieces, is_of_rank) &&
             std::ranges::none_of(contents_.tensors[shared].pieces, is_of_rank);
    };
    place_own_entries(spots, contents_.tensors, name_of, contents_.world_size, apart_, agree);
    return spots;
  }

  std::vector<Spot> spots_of_values() const {
    std::vector<Spot> spots;
    for (const ValueEntry& value : contents_.values) {
      spots.push_back(spot_of(value.name, value.key_path, value.dict_order));
    }
    const auto name_of = [](const ValueEntry& entry) -> const std::string& { return entry.name; };
    const auto always = [](std::size_t, std::size_t, int) { return true; };
    place_own_entries(spots, contents_.values, name_of, contents_.world_size, apart_, always);
    return spots;
  }

  const CheckpointContents& contents_;
  Files files_;
  std::set<std::size_t> dicts_;  // items for which the contents have an outermost dict
  std::set<std::string> apart_;  // own entries that replace no shared one
};

/// Says whether one of `model`, `optim` and `extra_state` is an entry of its own, beside entries
/// such as `optim.x` in a file of that name. A reader would join the two.
bool is_entry_beside_its_file(const CheckpointContents& contents, const Spots& spots) {
  std::set<std::size_t> items;
  std::set<std::size_t> entries;
  const auto look_at = [&](const Spot& spot, const std::string& name) {
    items.insert(spot.item);
    const auto found = std::ranges::find(kWrittenItems, name);
    const auto item = static_cast<std::size_t>(found - kWrittenItems.begin());
    if (spot.item == kOther && item < kOther) entries.insert(item);
  };
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    look_at(spots.tensors[i], contents.tensors[i].meta.fqn);
  }
  for (std::size_t i = 0; i < contents.aliases.size(); ++i) {
    look_at(spots.aliases[i], contents.aliases[i].fqn);
  }
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    look_at(spots.values[i], contents.values[i].name);
  }
  return std::ranges::any_of(entries, [&](std::size_t item) { return items.contains(item); });
}

}  // namespace

Spots find_spots(const CheckpointContents& contents) {
  Spots spots = SpotFinder(contents, SpotFinder::Files::by_item).find();
  if (is_entry_beside_its_file(contents, spots)) {
    return SpotFinder(contents, SpotFinder::Files::one).find();
  }
  for (std::size_t i = 0; i < contents.aliases.size(); ++i) {
    const std::size_t target = target_of(contents, contents.aliases[i]);
    if (spots.aliases[i].item == spots.tensors[target].item) continue;
    return SpotFinder(contents, SpotFinder::Files::one).find();
  }
  return spots;
}

RankContents::RankContents(const CheckpointContents& contents, const std::vector<Value>& values,
                           const DeviceMeshOptions& mesh, const std::string& destination)
    : contents_(contents),
      values_(values),
      mesh_(mesh),
      destination_(destination),
      spots_(find_spots(contents)),
      ranks_bytes_(ranks_storage_bytes(contents.world_size)) {
  TESSERA_CHECK(values_.size() == contents.values.size());
  check_key_paths(contents, destination);
  find_pieces();
  find_cuts();
  std::set<std::size_t> items;
  for (const auto* spots : {&spots_.tensors, &spots_.aliases, &spots_.values}) {
    for (const Spot& spot : *spots) items.insert(spot.item);
  }
  if (items.empty()) items.insert(0);
  for (int rank = 0; rank < contents.world_size; ++rank) {
    for (const std::size_t item : items) add_file(item, rank);
  }
}

void RankContents::refuse_pieces(std::size_t tensor) const {
  throw Error::expected(
      ErrorKind::invalid_argument,
      {.path = destination_, .fqn = contents_.tensors[tensor].meta.fqn}, "pieces",
      "pieces that cut one dimension among the ranks, as a DTensor does, or the "
      "whole tensor on each rank",
      std::to_string(contents_.tensors[tensor].pieces.size()) + " pieces of another kind",
      "strategies that fit: dim0, dim1, hybrid:AxB and replicated");
}

/// Whether a tensor is flat optimizer state of FSDP1, of which each rank has its own range in an
/// ordinary vector (see [Note: Flat state] in joined_ranks.cpp).
bool RankContents::is_flat(std::size_t tensor) const {
  const TensorEntry& entry = contents_.tensors[tensor];
  return entry.meta.shape.size() == 1 && is_numbered_state(entry.key_path) &&
         has_only_flat_ranges(entry);
}

/// Finds which piece of each tensor each rank holds. Throws if a rank holds two pieces of a tensor.
void RankContents::find_pieces() {
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    const TensorEntry& tensor = contents_.tensors[i];
    std::map<int, std::size_t>& pieces = piece_of_rank_.emplace_back();
    places_.emplace_back(tensor.pieces.size());
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      if (numel_of(tensor.pieces[p].region) == 0 && tensor.meta.numel() > 0) continue;
      if (!pieces.emplace(tensor.pieces[p].rank, p).second) refuse_pieces(i);
    }
  }
}

/// Returns the cuts of a DTensor that give the pieces of a tensor: only those with the most shards.
/// Several dimensions fit if they have size 1: then one rank has the whole tensor.
std::vector<DTensorCut> RankContents::fitting_cuts(std::size_t index) const {
  const TensorEntry& tensor = contents_.tensors[index];
  const Shape& shape = tensor.meta.shape;
  const int num_ranks = contents_.world_size;
  const std::map<int, std::size_t>& pieces = piece_of_rank_[index];
  const auto has_pieces = [&](const DTensorCut& cut) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Box box = cut.region_of(rank, shape);
      const auto piece = pieces.find(rank);
      if ((piece == pieces.end()) != (box.numel() == 0)) return false;
      if (box.numel() == 0) continue;
      const std::vector<Box> boxes = boxes_of(tensor.pieces[piece->second].region, shape);
      if (boxes != std::vector<Box>{box}) return false;
    }
    return true;
  };
  std::vector<DTensorCut> cuts;
  for (int num_shards = num_ranks; num_shards > 1 && cuts.empty(); --num_shards) {
    if (num_ranks % num_shards != 0) continue;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      const DTensorCut cut{dim, num_ranks / num_shards, num_shards};
      if (has_pieces(cut)) cuts.push_back(cut);
    }
  }
  return cuts;
}

/// Finds the cut of each tensor; none for an ordinary one, whole on its ranks. With one rank, only
/// scalars, empty tensors and `extra_state` are ordinary. If several dimensions fit, takes the one
/// that most other tensors are cut in. Throws if no cut gives the pieces of a tensor.
void RankContents::find_cuts() {
  cuts_.resize(contents_.tensors.size());
  std::map<std::size_t, std::vector<DTensorCut>> open_choices;  // key: index of the tensor
  std::map<std::size_t, std::size_t> num_cut_in;                // key: dimension
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    const TensorEntry& tensor = contents_.tensors[i];
    if (tensor.meta.shape.empty() || tensor.meta.numel() == 0 || is_flat(i)) continue;
    const Spot& spot = spots_.tensors[i];
    const auto is_whole_piece = [&](const auto& piece) {
      return is_whole(tensor, tensor.pieces[piece.second]);
    };
    const bool is_uncut = std::ranges::all_of(piece_of_rank_[i], is_whole_piece);
    if (contents_.world_size == 1 && is_uncut) {
      if (spot.item != kExtraState) cuts_[i] = DTensorCut{0, 1, 1};
      continue;
    }
    const bool is_on_all =
        piece_of_rank_[i].size() == static_cast<std::size_t>(contents_.world_size);
    if (is_uncut && (is_on_all || spot.only_on || !spot.not_on.empty())) continue;
    std::vector<DTensorCut> cuts = fitting_cuts(i);
    if (cuts.empty() && !is_uncut) refuse_pieces(i);
    if (cuts.empty()) continue;
    cuts_[i] = cuts.front();
    if (cuts.size() > 1) {
      open_choices.emplace(i, std::move(cuts));
    } else if (tensor.meta.shape.size() > 1) {
      ++num_cut_in[cuts.front().dim];
    }
  }
  for (const auto& [tensor, cuts] : open_choices) {
    cuts_[tensor] = *std::ranges::max_element(
        cuts, {}, [&](const DTensorCut& cut) { return num_cut_in[cut.dim]; });
  }
}

/// Whether a rank's file has a tensor. A part without elements counts.
bool RankContents::is_on(std::size_t tensor, int rank) const {
  if (!spots_.tensors[tensor].is_on(rank)) return false;
  return cuts_[tensor] || contents_.tensors[tensor].meta.numel() == 0 ||
         piece_of_rank_[tensor].contains(rank);
}

void RankContents::add_file(std::size_t item, int rank) {
  File file{written_file_name(kWrittenItems[item], contents_.world_size, rank), item, rank, {}, {}};
  for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
    if (spots_.tensors[i].item == item && is_on(i, rank)) file.tensors.push_back(i);
  }
  std::ranges::sort(file.tensors, {},
                    [&](std::size_t i) -> const std::string& { return spots_.tensors[i].name; });
  for (const std::size_t tensor : file.tensors) {
    file.has_ranks_storage = file.has_ranks_storage || cuts_[tensor];
    const auto piece = piece_of_rank_[tensor].find(rank);
    if (piece == piece_of_rank_[tensor].end()) {
      file.storages.emplace_back();
      continue;
    }
    places_[tensor][piece->second] = {files_.size(), file.storages.size()};
    file.storages.push_back(PieceId{tensor, piece->second});
  }
  if (file.has_ranks_storage) file.storages.emplace_back();
  files_.push_back(std::move(file));
}

std::set<std::string> RankContents::names() const {
  std::set<std::string> names;
  for (const File& file : files_) names.insert(file.name);
  return names;
}

std::string RankContents::pickle(const File& file) const {
  CheckpointContents here;
  std::vector<Value> values;
  for (const std::size_t i : file.tensors) {
    TensorEntry entry;
    entry.meta = contents_.tensors[i].meta;
    entry.meta.fqn = spots_.tensors[i].name;
    entry.key_path = spots_.tensors[i].path;
    entry.dict_order = spots_.tensors[i].dict_order;
    here.tensors.push_back(std::move(entry));
  }
  for (std::size_t i = 0; i < contents_.aliases.size(); ++i) {
    const std::size_t found = target_of(contents_, contents_.aliases[i]);
    // If this rank has a tensor of its own in place of the shared one, its names are tied, too.
    const bool is_here =
        is_on(found, file.rank) || spots_.tensors[found].not_on.contains(file.rank);
    if (spots_.aliases[i].item != file.item || !is_here) continue;
    here.aliases.push_back({spots_.aliases[i].name, spots_.tensors[found].name,
                            spots_.aliases[i].path, spots_.aliases[i].dict_order});
  }
  for (std::size_t i = 0; i < contents_.values.size(); ++i) {
    if (spots_.values[i].item != file.item || !spots_.values[i].is_on(file.rank)) continue;
    here.values.push_back(
        {spots_.values[i].name, spots_.values[i].path, spots_.values[i].dict_order});
    values.push_back(values_[i]);
  }
  check_key_paths(here, destination_);
  DTensorPickler dtensors(mesh_, file.rank, std::to_string(file.tensors.size()));
  const auto push = [&](pickle::Pickler& pickler, std::size_t tensor) {
    const std::size_t i = file.tensors[tensor];
    const TensorMeta& meta = contents_.tensors[i].meta;
    const std::string storage = std::to_string(tensor);
    if (!cuts_[i]) {
      const auto piece = piece_of_rank_[i].find(file.rank);
      const bool has_range = is_flat(i) && piece != piece_of_rank_[i].end();
      const Shape shape = has_range
                              ? Shape{numel_of(contents_.tensors[i].pieces[piece->second].region)}
                              : meta.shape;
      return torch_zip::pickle_tensor(pickler, meta.dtype, shape, storage);
    }
    dtensors.push(pickler, meta.dtype, meta.shape, *cuts_[i], storage);
  };
  return torch_zip::pickle_state_dict(here, values, destination_, {}, push);
}

TorchSaveLayout RankContents::layout(std::size_t index) const {
  const File& file = files_[index];
  std::vector<std::uint64_t> nbytes;
  for (const auto& piece : file.storages) {
    nbytes.push_back(0);
    if (!piece) continue;
    const TensorEntry& tensor = contents_.tensors[piece->tensor_index];
    nbytes.back() = nbytes_of(tensor.pieces[piece->piece_index].region, tensor.meta.dtype);
  }
  if (file.has_ranks_storage) nbytes.back() = ranks_bytes_.size();
  return TorchSaveLayout(pickle(file), nbytes, TorchSaveLayout::LargeStorages::at_pages);
}

void RankContents::require_readable() const {
  for (std::size_t file = 0; file < files_.size() && files_[file].rank == 0; ++file) {
    torch_zip::require_readable(layout(file), destination_);
  }
}

OutermostChanges outermost_changes(const CheckpointContents& contents) {
  const Spots spots = find_spots(contents);
  std::set<std::size_t> items;
  std::map<Key, std::uint32_t> orders;  // of the outermost keys: the smallest dict_order
  std::set<Key> nested;                 // outermost keys such as `model.w`
  const auto add = [&](const Spot& spot, const std::string& name, const KeyPath& path,
                       std::uint32_t dict_order) {
    const Key first = path.empty() ? Key(name) : path.front();
    const bool is_inside = spot.item != kOther && !spot.only_on;
    const Key outermost = is_inside ? Key(std::string(kWrittenItems[spot.item])) : first;
    items.insert(spot.item);
    if (first != outermost) nested.insert(first);
    const auto [found, is_new] = orders.emplace(outermost, dict_order);
    if (!is_new) found->second = std::min(found->second, dict_order);
  };
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    add(spots.tensors[i], tensor.meta.fqn, tensor.key_path, tensor.dict_order);
  }
  for (std::size_t i = 0; i < contents.aliases.size(); ++i) {
    const Alias& alias = contents.aliases[i];
    add(spots.aliases[i], alias.fqn, alias.key_path, alias.dict_order);
  }
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const ValueEntry& value = contents.values[i];
    add(spots.values[i], value.name, value.key_path, value.dict_order);
  }
  return {.reorders_keys = items.size() > 1 && !std::ranges::is_sorted(orders | std::views::values),
          .num_nested_keys = nested.size()};
}

}  // namespace tessera::formats::rank_files
