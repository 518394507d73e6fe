#include "formats/rank_files/joined_ranks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "base/value_bits.h"
#include "formats/distinct_names.h"
#include "formats/numbered_state.h"
#include "formats/opened_classes.h"
#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "formats/per_rank.h"
#include "formats/pointwise_state.h"
#include "formats/rank_files/file_names.h"
#include "formats/tensor_mesh.h"
#include "formats/torch_zip/equal_bytes.h"
#include "tessera/base/error.h"

namespace tessera::formats::rank_files {
namespace {

using torch_zip::ShardPlace;
using torch_zip::TorchFileReader;

/// An entry of one file.
struct Origin {
  std::size_t file;
  std::size_t index;  // in the file's tensors or values
};

/// All entries that the ranks have under one name, each list in the order of ranks.
struct Gathered {
  KeyPath key_path{};
  std::uint32_t dict_order = 0;  // of the first rank that has the entry
  std::vector<Origin> tensors{};
  std::vector<Origin> values{};     // values that can be read
  std::vector<Origin> refused{};    // values that cannot be read
  std::set<std::string> targets{};  // the tensors that it is an alias of, on some ranks
  /// Whether some rank has a tensor of this name that is not an alias. A part of a sharded tensor
  /// does not count if it is empty: it may be tied to another empty part, which no file shows.
  bool has_own = false;
};

/// Shows the files of all ranks as one checkpoint: joins the entries that the ranks have under one
/// name.
class JoinedRanks final : public DividedReader, public PartlyRead, public MeshSource {
 public:
  JoinedRanks(Format format, std::string path, int world_size, std::vector<RankFile> files,
              std::vector<Finding> notes)
      : format_(format), path_(std::move(path)), files_(std::move(files)) {
    contents_.world_size = world_size;
    contents_.opening_findings = std::move(notes);
    gather();
    drop_empty_containers();
    if (has_several_items()) order_outermost_keys();
    // Sharded tensors first, because `is_flat_state` needs to know whether any exist, and whether
    // they have replicas.
    for (const auto& [name, gathered] : by_name_) {
      if (has_unreadable_part(gathered)) unreadable_.insert(name);
    }
    for (const auto& [name, gathered] : by_name_) {
      note_numel(gathered);
      if (unreadable_.contains(name)) {
        add_unreadable(name, gathered);
        continue;
      }
      if (!gathered.tensors.empty()) add_values_beside_tensors(name, gathered);
      if (!gathered.targets.empty() && !is_tied(gathered)) untied_.push_back(name);
      if (!is_sharded(gathered)) continue;
      add_sharded(name, gathered);
      has_sharded_ = true;
      has_sharded_state_ = has_sharded_state_ || is_numbered_state(gathered.key_path);
    }
    for (const auto& [name, gathered] : by_name_) {
      if (!unreadable_.contains(name) && !is_sharded(gathered)) add_other(name, gathered);
    }
    refuse_other_models();
    by_name_.clear();
    unreadable_.clear();
    numels_.clear();
    sort_entries();
    require_distinct_names(contents_, path_, "save the entries in 'per_rank' under another key");
    add_what_readers_found();
    note_differences();
  }

  Format format() const override { return format_; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  /// Returns one list: the names of all items, one item after another, each in the order of its
  /// first file.
  std::vector<std::vector<std::string>> dict_orders() const override {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < files_.size(); ++i) {
      if (i > 0 && files_[i].item == files_[i - 1].item) continue;
      for (const std::vector<std::string>& order : files_[i].reader->dict_orders()) {
        for (const std::string& name : order) names.push_back(named(files_[i], name));
      }
    }
    return {std::move(names)};
  }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Origin& origin = pieces_[tensor_index][piece_index];
    reader_of(origin).read_piece(origin.index, 0, range, out);
  }
  Value read_value(std::size_t value_index) const override {
    const Origin& origin = values_[value_index];
    return reader_of(origin).read_value(origin.index);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const Origin& origin = pieces_[tensor_index][piece_index];
    PieceStorage storage = reader_of(origin).piece_storage(origin.index, 0);
    storage.file = files_[origin.file].name;
    return storage;
  }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for (const RankFile& file : files_) files.push_back(file.reader->path());
    return files;
  }
  std::optional<TensorMesh> mesh_of(std::size_t tensor_index) const override {
    const std::string& name = contents_.tensors[tensor_index].meta.fqn;
    std::optional<TensorMesh> mesh;
    for (const RankFile& file : files_) {
      const ShardPlace* const place = place_in(file, name);
      if (place == nullptr || place->placements.empty()) continue;
      if (!mesh) {
        mesh = TensorMesh{place->axes, place->mesh, {}, {}};
        for (const torch_zip::AxisPlacement& placement : place->placements) {
          mesh->placements.push_back(placement_to_string(placement));
        }
      }
      mesh->coordinates.emplace_back(file.rank, place->coordinates);
    }
    if (mesh) std::ranges::sort(mesh->coordinates);
    return mesh;
  }
  void check_files(const FindingSink& /*sink*/) const override {}  // all of them were opened
  void check_rest(const RestOptions& options) const override {
    for (const RankFile& file : files_) formats::check_rest(*file.reader, options);
  }
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    if (part.takes(0)) {
      for (std::size_t i = 0; i < contents_.opening_findings.size(); ++i) {
        const bool is_of_file = i >= begin_of_files_notes_ && i < end_of_files_notes_;
        if (!is_of_file) sink(contents_.opening_findings[i]);  // the files' readers report theirs
      }
    }
    const std::set<std::pair<std::string, std::string>> refused = names_of_refused_values();
    for (const RankFile& file : files_) {
      const auto pass_on = [&](const Finding& finding) {
        // The check of all entries reports these values again, under their names here.
        const bool is_refused =
            finding.rule == "value" && refused.contains({file.name, finding.where.fqn});
        if (!is_refused && !is_about_name(file, finding)) sink(with_full_name(file, finding));
      };
      formats::verify_part(*file.reader, pass_on, progress, num_threads, part);
    }
  }

 private:
  const TorchFileReader& reader_of(const Origin& origin) const {
    return *files_[origin.file].reader;
  }
  int rank_of(const Origin& origin) const { return files_[origin.file].rank; }
  const TensorEntry& tensor_of(const Origin& origin) const {
    return reader_of(origin).contents().tensors[origin.index];
  }
  /// Returns the place of one rank's part in the whole tensor `name`. Returns null if the file has
  /// no tensor `name`, has the whole tensor, or is sole (`is_sole`).
  static const ShardPlace* place_in(const RankFile& file, std::string_view name) {
    const std::string front = file.item.empty() ? std::string() : file.item + ".";
    if (file.is_sole || !name.starts_with(front)) return nullptr;
    const CheckpointContents& contents = file.reader->contents();
    const TensorEntry* const tensor = contents.find_tensor(name.substr(front.size()));
    if (tensor == nullptr) return nullptr;
    const auto index = static_cast<std::size_t>(tensor - contents.tensors.data());
    return file.reader->place_of(index).get();
  }
  const ShardPlace* place_of(const Origin& origin) const {
    return reader_of(origin).place_of(origin.index).get();
  }
  ErrorWhere where(const Origin& origin, const std::string& name) const {
    return {.path = reader_of(origin).path(), .fqn = name};
  }
  std::string rank_in_words(const Origin& origin) const {
    return "rank " + std::to_string(rank_of(origin));
  }

  /// Whether a note says which name a file's only tensor or value gets. These notes are left out,
  /// because here the entry gets the name of the item.
  static bool is_about_name(const RankFile& file, const Finding& finding) {
    return file.is_sole && finding.severity == Finding::Severity::note &&
           finding.rule == "structure";
  }

  /// Returns the values that cannot be read and that are entries here: each one's file, and its
  /// name in that file.
  std::set<std::pair<std::string, std::string>> names_of_refused_values() const {
    std::set<std::pair<std::string, std::string>> names;
    for (const Origin& origin : values_) {
      if (reader_of(origin).refusal_of(origin.index) == nullptr) continue;
      names.emplace(files_[origin.file].name,
                    reader_of(origin).contents().values[origin.index].name);
    }
    return names;
  }

  static Finding with_full_name(const RankFile& file, Finding finding) {
    std::string& name = finding.where.fqn;
    if (!name.empty()) name = named(file, name);
    return finding;
  }

  // --- gathering

  static std::string named(const RankFile& file, const std::string& name) {
    if (file.is_sole) return file.item;
    return file.item.empty() ? name : file.item + "." + name;
  }
  static KeyPath pathed(const RankFile& file, const std::string& name, const KeyPath& path) {
    if (file.is_sole) return {};
    if (file.item.empty()) return path;
    KeyPath result{file.item};
    if (path.empty()) {
      result.emplace_back(name);
    } else {
      result.insert(result.end(), path.begin(), path.end());
    }
    return result;
  }
  Gathered& entry(const RankFile& file, const std::string& name, const KeyPath& path,
                  std::uint32_t dict_order) {
    const auto [found, is_new] = by_name_.try_emplace(named(file, name));
    KeyPath whole = pathed(file, name, path);
    note_lists(file, whole);
    if (is_new) {
      found->second.key_path = std::move(whole);
      found->second.dict_order = dict_order;
    } else if (found->second.key_path != whole) {
      other_keys_.emplace(found->first, file.rank);
    }
    return found->second;
  }

  /// Records the lengths that the lists on a key path have on one rank, as far as the entries show.
  void note_lists(const RankFile& file, const KeyPath& path) {
    for (std::size_t i = 0; i < path.size(); ++i) {
      const auto* const position = std::get_if<std::int64_t>(&path[i]);
      if (position == nullptr) continue;
      const auto at = path.begin() + static_cast<std::ptrdiff_t>(i);
      std::int64_t& length = list_lengths_[spell(KeyPath(path.begin(), at))][file.rank];
      length = std::max(length, *position + 1);
    }
  }

  void gather() {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const CheckpointContents& from = files_[i].reader->contents();
      for (std::size_t t = 0; t < from.tensors.size(); ++t) {
        const TensorEntry& tensor = from.tensors[t];
        Gathered& gathered = entry(files_[i], tensor.meta.fqn, tensor.key_path, tensor.dict_order);
        gathered.tensors.push_back({i, t});
        const bool is_own = tensor.meta.numel() > 0 || !place_of(gathered.tensors.back());
        gathered.has_own = gathered.has_own || is_own;
      }
      for (const Alias& alias : from.aliases) {
        const TensorEntry* const target = from.find_tensor(alias.target);
        TESSERA_CHECK(target != nullptr);
        Gathered& gathered = entry(files_[i], alias.fqn, alias.key_path, alias.dict_order);
        gathered.tensors.push_back({i, static_cast<std::size_t>(target - from.tensors.data())});
        gathered.targets.insert(named(files_[i], alias.target));
      }
      for (std::size_t v = 0; v < from.values.size(); ++v) {
        const ValueEntry& value = from.values[v];
        Gathered& gathered = entry(files_[i], value.name, value.key_path, value.dict_order);
        const bool is_refused = files_[i].reader->refusal_of(v) != nullptr;
        (is_refused ? gathered.refused : gathered.values).push_back({i, v});
      }
      files_[i].reader->drop_key_paths();  // by_name_ has them
    }
  }

  /// Returns an entry that is in the dict or list `outer`; null if no rank has one.
  const Gathered* find_within(const std::string& name, const Gathered& outer) const {
    const KeyPath& path = outer.key_path;
    const KeyPath whole = path.empty() ? KeyPath{name} : path;
    const std::string front = name + ".";
    for (auto next = by_name_.lower_bound(front);
         next != by_name_.end() && next->first.starts_with(front); ++next) {
      const KeyPath& inner = next->second.key_path;
      if (inner.size() > whole.size() && std::equal(whole.begin(), whole.end(), inner.begin())) {
        return &next->second;
      }
    }
    return nullptr;
  }

  /// Leaves out a dict or list that is empty on some ranks and has entries on others. If a rank has
  /// another value in its place, this becomes an entry `per_rank.<rank>.<name>`. Throws if a rank
  /// has a tensor there.
  void drop_empty_containers() {
    const auto is_empty = [&](const Origin& origin) {
      const Value value = reader_of(origin).read_value(origin.index);
      const auto* const dict = value.get_if<Value::Dict>();
      const auto* const list = value.get_if<Value::List>();
      return (dict != nullptr && dict->empty()) || (list != nullptr && list->empty());
    };
    for (auto next = by_name_.begin(); next != by_name_.end();) {
      const auto& [name, outer] = *next;
      const Gathered* const inner = find_within(name, outer);
      if (inner == nullptr) {
        ++next;
        continue;
      }
      if (!outer.tensors.empty()) {
        throw Error::expected(ErrorKind::corruption, where(outer.tensors.front(), name),
                              "entries of ranks",
                              "a dict or a list, as on " + rank_in_words(first_of(*inner)),
                              "a tensor", "files of different saves?");
      }
      for (const Origin& origin : outer.values) {
        if (is_empty(origin)) {
          on_some_ranks_.insert(name);
        } else {
          add_own_value(name, outer, origin);
        }
      }
      for (const Origin& origin : outer.refused) add_own_value(name, outer, origin);
      next = by_name_.erase(next);
    }
  }

  static const Origin& first_of(const Gathered& gathered) {
    if (!gathered.tensors.empty()) return gathered.tensors.front();
    return gathered.values.empty() ? gathered.refused.front() : gathered.values.front();
  }

  bool has_several_items() const {
    return std::ranges::any_of(
        files_, [&](const RankFile& file) { return file.item != files_.front().item; });
  }

  /// Sorts the keys of the outermost dict by name, because no file has all of these keys. Below
  /// each key, keeps the order.
  void order_outermost_keys() {
    std::vector<std::pair<Key, Gathered*>> entries;
    for (auto& [name, gathered] : by_name_) {
      const KeyPath& path = gathered.key_path;
      entries.emplace_back(path.empty() ? Key(name) : path.front(), &gathered);
    }
    std::ranges::stable_sort(entries, [](const auto& a, const auto& b) {
      const auto order = a.first <=> b.first;
      return order != 0 ? order < 0 : a.second->dict_order < b.second->dict_order;
    });
    std::uint32_t number = 0;
    for (const auto& entry : entries) entry.second->dict_order = ++number;
  }

  // --- putting together

  /// Whether one rank has a tensor and another rank, under the same name, an entry that cannot be
  /// read. Does not count for a ShardedTensor: such a rank has no shard, or its elements are
  /// missing.
  bool has_unreadable_part(const Gathered& gathered) const {
    if (gathered.tensors.empty() || gathered.refused.empty()) return false;
    const ShardPlace* const place = place_of(gathered.tensors.front());
    return place == nullptr || !place->mesh.empty();
  }

  /// Adds a tensor that cannot be read on some rank as one value that cannot be read: a part of it
  /// would be of no use. All other entries of the folder can still be moved.
  void add_unreadable(const std::string& name, const Gathered& gathered) {
    add_value(name, gathered.key_path, gathered.dict_order, gathered.refused.front());
    add_values_beside_tensors(name, gathered);
    has_sharded_state_ = has_sharded_state_ || (place_of(gathered.tensors.front()) != nullptr &&
                                                is_numbered_state(gathered.key_path));
  }

  bool is_sharded(const Gathered& gathered) const {
    return !gathered.tensors.empty() && !is_tied(gathered) &&
           place_of(gathered.tensors.front()) != nullptr;
  }

  /// Whether some ranks have no entry of this name. Items of lists do not count: there is another
  /// note about lists of different lengths.
  bool is_on_some_ranks(const Gathered& gathered) const {
    const auto is_position = [](const Key& key) {
      return std::holds_alternative<std::int64_t>(key);
    };
    const std::size_t num_ranks =
        gathered.tensors.size() + gathered.values.size() + gathered.refused.size();
    return num_ranks < static_cast<std::size_t>(contents_.world_size) &&
           std::ranges::none_of(gathered.key_path, is_position);
  }

  void add_other(const std::string& name, const Gathered& gathered) {
    if (is_on_some_ranks(gathered)) on_some_ranks_.insert(name);
    if (gathered.tensors.empty()) {
      add_values(name, gathered);
    } else if (is_tied(gathered)) {
      contents_.aliases.push_back(
          {name, *gathered.targets.begin(), gathered.key_path, gathered.dict_order});
    } else if (is_flat_state(name, gathered)) {
      add_flat_state(name, gathered);
    } else {
      add_plain(name, gathered);
    }
  }

  /// Whether the name is an alias of the same tensor on every rank, except ranks that have an empty
  /// part of a sharded tensor.
  bool is_tied(const Gathered& gathered) const {
    return !gathered.has_own && gathered.targets.size() == 1 &&
           !unreadable_.contains(*gathered.targets.begin());
  }

  void add_sharded(const std::string& name, const Gathered& gathered) {
    const Origin& first = gathered.tensors.front();
    TensorEntry tensor;
    tensor.meta = {name, tensor_of(first).meta.dtype, place_of(first)->whole_shape};
    validate_tensor_meta(tensor.meta, reader_of(first).path());
    tensor.key_path = gathered.key_path;
    tensor.dict_order = gathered.dict_order;
    std::vector<Origin> origins;
    for (const Origin& origin : gathered.tensors) {
      check_part(tensor.meta, origin, first);
      const Box& region = place_of(origin)->region;
      if (region.numel() == 0 && tensor.meta.numel() > 0) continue;
      tensor.pieces.push_back({region, rank_of(origin)});
      origins.push_back(origin);
    }
    read_first_replicas(tensor, origins);
    add_tensor(std::move(tensor), std::move(origins));
  }

  void add_tensor(TensorEntry tensor, std::vector<Origin> origins) {
    contents_.tensors.push_back(std::move(tensor));
    pieces_.push_back(std::move(origins));
  }

  /// Throws unless the part in `origin` fits the whole tensor. `whole`: the tensor as the file in
  /// `first` describes it.
  void check_part(const TensorMeta& whole, const Origin& origin, const Origin& first) const {
    const ShardPlace* const place = place_of(origin);
    const auto require = [&](bool holds, const std::string& rule, const std::string& expected,
                             const std::string& found) {
      if (holds) return;
      throw Error::expected(ErrorKind::corruption, where(origin, whole.fqn), rule, expected, found,
                            "files of different saves?");
    };
    const std::string as_first = ", as on " + rank_in_words(first);
    require(place != nullptr, "parts of ranks", "a DTensor or a ShardedTensor" + as_first,
            "an ordinary tensor");
    if (!place->problem.empty()) {
      throw Error::expected(ErrorKind::unsupported, where(origin, whole.fqn), "parts of ranks",
                            "a part whose place is known", place->problem);
    }
    const TensorMeta& own = tensor_of(origin).meta;
    require(place->whole_shape == whole.shape, "shape of the whole",
            shape_to_string(whole.shape) + as_first, shape_to_string(place->whole_shape));
    require(place->mesh == place_of(first)->mesh, "mesh",
            shape_to_string(place_of(first)->mesh) + as_first, shape_to_string(place->mesh));
    require(own.dtype == whole.dtype, "dtype", std::string(dtype_name(whole.dtype)) + as_first,
            std::string(dtype_name(own.dtype)));
    require(own.shape == place->region.sizes, "shape of a part",
            shape_to_string(place->region.sizes) + ", as its placements say",
            shape_to_string(own.shape));
    require(!place->rank || *place->rank == rank_of(origin), "rank",
            "a part that " + rank_in_words(origin) + " saved, as the file's name says",
            "a part that rank " + std::to_string(place->rank.value_or(0)) + " saved");
  }

  /// Lets each replica whose bytes differ from those of the first replica be read from the first
  /// one, so that all readers get the same, and adds a note about it.
  void read_first_replicas(const TensorEntry& tensor, std::vector<Origin>& origins) {
    std::map<Region, Origin> first_of;
    const bool has_groups = has_groups_of_ranks(origins);
    for (std::size_t i = 0; i < origins.size(); ++i) {
      const auto [found, is_new] = first_of.emplace(tensor.pieces[i].region, origins[i]);
      if (is_new) continue;
      has_replicas_ = true;
      const Origin& first = found->second;
      const std::uint64_t nbytes = tensor_of(origins[i]).meta.nbytes();
      if (has_groups) nbytes_of_groups_ += nbytes;
      if (torch_zip::are_equal(reader_of(first), first.index, reader_of(origins[i]),
                               origins[i].index)) {
        continue;
      }
      if (has_groups) {
        differing_nbytes_of_groups_ += nbytes;
        const bool is_weight = is_weight_like(tensor.meta);
        if (!first_differing_ || (is_weight && !do_weights_differ_)) {
          first_differing_.emplace(tensor.meta.fqn, first, origins[i]);
        }
        do_weights_differ_ = do_weights_differ_ || is_weight;
      }
      contents_.opening_findings.push_back({.severity = Finding::Severity::note,
                                            .rule = "replicas",
                                            .where = where(origins[i], tensor.meta.fqn),
                                            .expected = "the bytes of " + rank_in_words(first),
                                            .found = "other bytes"});
      origins[i] = first;
    }
  }

  /// Whether a tensor is no short vector, such as the statistics of BatchNorm, which may differ.
  /// tessera.save has the same rule.
  static bool is_weight_like(const TensorMeta& meta) {
    constexpr std::int64_t kMaxStatistics = std::int64_t{1} << 16;
    return meta.shape.size() > 1 || meta.numel() > kMaxStatistics;
  }

  /// Whether groups of ranks have the tensor, each with a mesh of its own. A DTensor's mesh is then
  /// smaller than the number of its ranks. ShardedTensors do not say what their group is.
  bool has_groups_of_ranks(const std::vector<Origin>& origins) const {
    if (origins.empty()) return false;
    std::int64_t num_in_mesh = 1;
    for (const std::int64_t size : place_of(origins.front())->mesh) num_in_mesh *= size;
    return num_in_mesh < static_cast<std::int64_t>(origins.size());
  }

  /// Throws if weights, or most bytes, that groups of ranks have under equal names differ: then
  /// they have different models, such as pipeline stages, and all but the first would be lost.
  void refuse_other_models() const {
    if (!do_weights_differ_ && differing_nbytes_of_groups_ <= nbytes_of_groups_ / 2) return;
    const auto& [name, first, other] = *first_differing_;
    throw Error::expected(
        ErrorKind::unsupported, where(other, name), "replicas",
        "the bytes of " + rank_in_words(first),
        "other bytes in another group of ranks with equal names",
        "pipeline stages, or experts? give those of each group names of their own");
  }

  /// [Note: Flat state] FSDP1's optimizer keys state by number, and each rank saves a flat range:
  /// first comes the range of rank 0, then that of rank 1, and so on. These ranges become one
  /// vector, whose pieces are flat ranges. If several ranks have the same shards (HYBRID_SHARD),
  /// the files do not show which ranks, so the ranges are not joined. Nor are they if no tensor is
  /// sharded, as with DDP, or if other state under numbers is sharded, as FSDP2 has it: then a
  /// vector is whole on each rank. So are equal vectors on all ranks, such as the tables of 8-bit
  /// optimizers, unless they are state that still has its first value (`is_unchanged_flat_state`).
  /// Vectors that may be something else than one element for each of the rank's elements of the
  /// parameter (`has_element_for_element`) stay on their ranks, with a note.
  bool is_flat_state(const std::string& name, const Gathered& gathered) {
    if (!has_sharded_ || has_replicas_ || has_sharded_state_) return false;
    const DType dtype = tensor_of(gathered.tensors.front()).meta.dtype;
    const auto has_dtype = [&](const Origin& origin) {
      return is_vector(origin) && tensor_of(origin).meta.dtype == dtype;
    };
    if (!is_numbered_state(gathered.key_path)) return false;
    if (!std::ranges::all_of(gathered.tensors, has_dtype)) return false;
    if (are_copies(gathered) && !is_unchanged_flat_state(name, gathered)) return false;
    if (has_element_for_element(gathered)) return true;
    not_joined_.insert(name);
    return false;
  }

  /// Whether the rank has an ordinary tensor of one dimension.
  bool is_vector(const Origin& origin) const {
    return !place_of(origin) && tensor_of(origin).meta.shape.size() == 1;
  }

  /// Whether a vector under a number has one element for each element of the parameter that the
  /// rank has. 8-bit optimizers have not: they keep codes of one byte, and one scale for each block
  /// of codes of a rank (`absmax1`), so a joined vector of codes would get the scales of other
  /// blocks. Any other vector is compared with the number's state of known names, such as `exp_avg`
  /// (all must be as long on each rank), or without such state with the sizes of the parameters.
  bool has_element_for_element(const Gathered& gathered) const {
    const auto is_part = [&](const Origin& origin) { return is_vector(origin); };
    const auto has_numel = [&](const Origin& a, const Origin& b) {
      return rank_of(a) == rank_of(b) && tensor_of(a).meta.numel() == tensor_of(b).meta.numel();
    };
    bool is_known = false;
    const std::string front = *front_of_numbered_state(gathered.key_path);
    for (auto next = by_name_.lower_bound(front);
         next != by_name_.end() && next->first.starts_with(front); ++next) {
      const auto& [name, other] = *next;
      if (other.tensors.empty() || !std::ranges::all_of(other.tensors, is_part)) continue;
      if (is_quantized_state(name, tensor_of(other.tensors.front()).meta.dtype)) return false;
      if (!is_pointwise_name(std::string_view(name).substr(front.size()))) continue;
      if (!std::ranges::equal(other.tensors, gathered.tensors, has_numel)) return false;
      is_known = true;
    }
    if (is_known) return true;
    std::int64_t joined = 0;
    for (const Origin& origin : gathered.tensors) joined += tensor_of(origin).meta.numel();
    return numels_.contains(joined);
  }

  /// Whether several ranks have the tensor, all with the same bytes.
  bool are_copies(const Gathered& gathered) const {
    const Origin& first = gathered.tensors.front();
    return gathered.tensors.size() > 1 &&
           std::ranges::all_of(gathered.tensors, [&](const Origin& origin) {
             return torch_zip::are_equal(reader_of(first), first.index, reader_of(origin),
                                         origin.index);
           });
  }

  /// Whether copies of a vector on all ranks are ranges of flat state in which all elements are
  /// equal, as before the first step. This is so if other state of the parameter is flat and has as
  /// many elements on each rank. Without such state, it is so if the joined vector is as long as
  /// some parameter, or if no parameter is as long as one rank's vector.
  bool is_unchanged_flat_state(const std::string& name, const Gathered& gathered) const {
    const Origin& first = gathered.tensors.front();
    const std::string front = name.substr(0, name.rfind('.') + 1);
    for (auto next = by_name_.lower_bound(front);
         next != by_name_.end() && next->first.starts_with(front); ++next) {
      const Gathered& other = next->second;
      if (next->first == name || other.tensors.size() != gathered.tensors.size()) continue;
      if (tensor_of(other.tensors.front()).meta.shape.size() != 1 || are_copies(other)) continue;
      return std::ranges::equal(
                 other.tensors, gathered.tensors, {},
                 [&](const Origin& origin) { return tensor_of(origin).meta.numel(); },
                 [&](const Origin& origin) { return tensor_of(origin).meta.numel(); }) &&
             is_constant(first);
    }
    const std::int64_t numel = tensor_of(first).meta.numel();
    const auto joined = checked_mul(numel, static_cast<std::int64_t>(gathered.tensors.size()));
    if (!joined || !is_constant(first)) return false;
    return numels_.contains(*joined) || (numel > 1 && !numels_.contains(numel));
  }

  /// Remembers the size of a whole tensor that is no numbered state, for is_unchanged_flat_state.
  void note_numel(const Gathered& gathered) {
    if (gathered.tensors.empty() || is_numbered_state(gathered.key_path)) return;
    const Origin& first = gathered.tensors.front();
    const ShardPlace* const place = place_of(first);
    const Shape& shape = place != nullptr ? place->whole_shape : tensor_of(first).meta.shape;
    numels_.insert(checked_numel(shape).value_or(0));
  }

  /// Whether all elements of a tensor have the same bytes.
  bool is_constant(const Origin& origin) const {
    constexpr std::int64_t kWindowNumel = 1 << 16;
    const TensorMeta& meta = tensor_of(origin).meta;
    const std::size_t size = itemsize(meta.dtype);
    std::vector<std::byte> first(size);
    std::vector<std::byte> window;
    for (std::int64_t begin = 0; begin < meta.numel(); begin += kWindowNumel) {
      const FlatRange range{begin, std::min(begin + kWindowNumel, meta.numel())};
      window.resize(static_cast<std::size_t>(range.numel()) * size);
      reader_of(origin).read_piece(origin.index, 0, range, window);
      if (begin == 0) std::copy_n(window.begin(), size, first.begin());
      for (std::size_t at = 0; at < window.size(); at += size) {
        if (!std::equal(first.begin(), first.end(),
                        window.begin() + static_cast<std::ptrdiff_t>(at))) {
          return false;
        }
      }
    }
    return true;
  }

  void add_flat_state(const std::string& name, const Gathered& gathered) {
    TensorEntry tensor;
    tensor.meta = tensor_of(gathered.tensors.front()).meta;
    tensor.meta.fqn = name;
    tensor.key_path = gathered.key_path;
    tensor.dict_order = gathered.dict_order;
    std::int64_t end = 0;
    for (const Origin& origin : gathered.tensors) {
      const std::int64_t numel = tensor_of(origin).meta.numel();
      tensor.pieces.push_back({FlatRange{end, end + numel}, rank_of(origin)});
      end += numel;
    }
    tensor.meta.shape = {end};
    ++num_flat_;
    add_tensor(std::move(tensor), gathered.tensors);
  }

  /// Adds a tensor that is an ordinary tensor on every rank, neither a DTensor nor a ShardedTensor.
  /// Ranks whose copy differs from the first rank's copy get an entry `per_rank.<rank>.<name>`.
  void add_plain(const std::string& name, const Gathered& gathered) {
    const Origin& first = gathered.tensors.front();
    std::vector<Origin> equal;
    for (const Origin& origin : gathered.tensors) {
      if (place_of(origin)) {
        throw Error::expected(ErrorKind::corruption, where(origin, name), "parts of ranks",
                              "an ordinary tensor, as on " + rank_in_words(first),
                              "a DTensor or a ShardedTensor", "files of different saves?");
      }
      if (torch_zip::are_equal(reader_of(first), first.index, reader_of(origin), origin.index)) {
        equal.push_back(origin);
      } else {
        add_copy(per_rank_name(origin, name), per_rank_path_of(origin, name, gathered.key_path),
                 gathered.dict_order, {origin});
        differing_.push_back(name);
      }
    }
    add_copy(name, gathered.key_path, gathered.dict_order, std::move(equal));
  }

  /// Adds a tensor of which each rank in `origins` has a whole copy.
  void add_copy(const std::string& name, KeyPath key_path, std::uint32_t dict_order,
                std::vector<Origin> origins) {
    TensorEntry tensor;
    tensor.meta = tensor_of(origins.front()).meta;
    tensor.meta.fqn = name;
    tensor.key_path = std::move(key_path);
    tensor.dict_order = dict_order;
    for (const Origin& origin : origins) {
      tensor.pieces.push_back({whole_box(tensor.meta.shape), rank_of(origin)});
    }
    add_tensor(std::move(tensor), std::move(origins));
  }

  void add_values(const std::string& name, const Gathered& gathered) {
    if (gathered.values.empty()) {
      return add_value(name, gathered.key_path, gathered.dict_order, gathered.refused[0]);
    }
    const Origin& first = gathered.values.front();
    const Value value = reader_of(first).read_value(first.index);
    add_value(name, gathered.key_path, gathered.dict_order, first);
    for (const Origin& origin : gathered.values) {
      if (tessera::detail::have_equal_bits(reader_of(origin).read_value(origin.index), value)) {
        continue;
      }
      add_own_value(name, gathered, origin);
    }
    for (const Origin& origin : gathered.refused) {
      add_value(per_rank_name(origin, name), per_rank_path_of(origin, name, gathered.key_path),
                gathered.dict_order, origin);
    }
  }

  /// Adds the values of ranks that have no tensor under the name, while other ranks have one.
  void add_values_beside_tensors(const std::string& name, const Gathered& gathered) {
    for (const Origin& origin : gathered.values) {
      add_value(per_rank_name(origin, name), per_rank_path_of(origin, name, gathered.key_path),
                gathered.dict_order, origin);
    }
    if (!gathered.values.empty()) beside_tensors_.push_back(name);
  }

  /// Adds a rank's value that differs from what other ranks have under the name.
  void add_own_value(const std::string& name, const Gathered& gathered, const Origin& origin) {
    add_value(per_rank_name(origin, name), per_rank_path_of(origin, name, gathered.key_path),
              gathered.dict_order, origin);
    differing_.push_back(name);
  }

  void add_value(const std::string& name, KeyPath key_path, std::uint32_t dict_order,
                 const Origin& origin) {
    contents_.values.push_back({name, std::move(key_path), dict_order});
    values_.push_back(origin);
  }

  std::string per_rank_name(const Origin& origin, const std::string& name) const {
    return spell(per_rank_path(rank_of(origin), name, {}));
  }
  KeyPath per_rank_path_of(const Origin& origin, const std::string& name,
                           const KeyPath& path) const {
    return per_rank_path(rank_of(origin), name, path);
  }

  // --- after all entries are there

  /// Sorts the lists by name, as contents must be.
  void sort_entries() {
    sort_with(contents_.tensors, pieces_,
              [](const TensorEntry& entry) -> const std::string& { return entry.meta.fqn; });
    sort_with(contents_.values, values_,
              [](const ValueEntry& entry) -> const std::string& { return entry.name; });
  }
  template <class Entry, class Parallel, class NameOf>
  static void sort_with(std::vector<Entry>& entries, std::vector<Parallel>& parallel,
                        const NameOf& name_of) {
    std::vector<std::size_t> order(entries.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::sort(order, {},
                      [&](std::size_t i) { return std::string_view(name_of(entries[i])); });
    std::vector<Entry> sorted;
    std::vector<Parallel> sorted_parallel;
    for (const std::size_t i : order) {
      sorted.push_back(std::move(entries[i]));
      sorted_parallel.push_back(std::move(parallel[i]));
    }
    entries = std::move(sorted);
    parallel = std::move(sorted_parallel);
  }

  /// Adds what the files' readers found: the sum of their opened classes, their simplifications
  /// (equal ones of several ranks once), and their notes, except those `is_about_name`.
  void add_what_readers_found() {
    OpenedClassSum opened;
    std::map<std::pair<std::string, Simplification::Kind>, std::set<std::string>> simplified;
    begin_of_files_notes_ = contents_.opening_findings.size();
    for (const RankFile& file : files_) {
      const CheckpointContents& from = file.reader->contents();
      opened.add(from.opened_classes);
      for (const auto& [kind, name, what] : from.simplifications) {
        const bool is_dtensor = kind == Simplification::Kind::dtensor;
        if (is_dtensor && contents_.world_size > 1) continue;  // their pieces show them
        const std::string full = name.empty() ? file.item : named(file, name);
        simplified[{full, is_dtensor ? Simplification::Kind::dtensor_of_rank : kind}].insert(
            what.begin(), what.end());
      }
      for (const Finding& finding : from.opening_findings) {
        if (is_about_name(file, finding)) continue;
        contents_.opening_findings.push_back(with_full_name(file, finding));
      }
    }
    end_of_files_notes_ = contents_.opening_findings.size();
    contents_.opened_classes = opened.classes();
    for (const auto& [entry, what] : simplified) {
      contents_.simplifications.push_back({entry.second, entry.first, {what.begin(), what.end()}});
    }
  }

  void note_differences() {
    const auto note = [&](std::string expected, std::string found) {
      contents_.opening_findings.push_back({.severity = Finding::Severity::note,
                                            .rule = "ranks",
                                            .where = {.path = path_},
                                            .expected = std::move(expected),
                                            .found = std::move(found)});
    };
    std::map<std::string, bool> has_entries;  // key: item
    for (const RankFile& file : files_) {
      const CheckpointContents& contents = file.reader->contents();
      has_entries[file.item] |= !contents.tensors.empty() || !contents.values.empty();
    }
    for (const auto& [item, has_any] : has_entries) {
      if (has_any || item.empty() || has_entries.size() == 1) continue;
      note("entries in the files of each kind",
           "only empty dicts in the files of '" + printable(item) + "' (left out by a move)");
    }
    if (!not_joined_.empty()) {
      note("flat optimizer state with one element for each element of the parameter",
           counted(not_joined_.size(), "vector") +
               " of other state, as of 8-bit optimizers, such as '" +
               printable(*not_joined_.begin()) +
               "' (each rank keeps its own, of use only for the same number of ranks)");
    }
    if (num_flat_ > 0) {
      note("flat optimizer state that records where each rank's part is",
           counted(num_flat_, "tensor") +
               " of FSDP1 without this record (joined in the order of ranks)");
    }
    const auto such_as = [](std::size_t count, const std::string& things, const std::string& what,
                            const std::string& name) {
      return counted(count, things) + " " + what + ", such as '" + printable(name) + "'";
    };
    if (!untied_.empty()) {
      note("the same tied tensors on all ranks",
           such_as(untied_.size(), "name", "tied on some ranks only", untied_.front()) +
               " (read as a separate tensor on all ranks)");
    }
    if (!beside_tensors_.empty()) {
      note("a tensor on all ranks",
           such_as(beside_tensors_.size(), "name", "with a value on some ranks",
                   beside_tensors_.front()) +
               " (the tensor keeps the name, the values are per_rank.<rank>.<name>)");
    }
    if (!other_keys_.empty()) {
      const auto& [name, rank] = *other_keys_.begin();
      note("keys of the same types on all ranks",
           such_as(other_keys_.size(), "name", "with a key of another type (0 and '0')", name) +
               " on rank " + std::to_string(rank) + " (the key of the lowest rank is kept)");
    }
    std::vector<std::string> lists;  // names of lists that differ in length
    for (const auto& [name, lengths] : list_lengths_) {
      const std::int64_t first = lengths.begin()->second;
      const auto differs = [&](const auto& length) { return length.second != first; };
      if (std::ranges::any_of(lengths, differs)) lists.push_back(name);
      if (lengths.size() < static_cast<std::size_t>(contents_.world_size)) {
        on_some_ranks_.insert(name);
      }
    }
    if (!on_some_ranks_.empty()) {
      note("the same names on all ranks",
           such_as(on_some_ranks_.size(), "name", "on some ranks only", *on_some_ranks_.begin()) +
               " (read as an entry of the checkpoint; rank files of a move have it on all ranks)");
    }
    if (!lists.empty()) {
      note("lists of equal lengths on all ranks",
           such_as(lists.size(), "list", "with other lengths on some ranks", lists.front()) +
               " (read as one list with all positions)");
    }
    if (!differing_.empty()) {
      const std::set<std::string> names(differing_.begin(), differing_.end());
      contents_.opening_findings.push_back(per_rank_note(path_, names));
    }
    forget_noted_names();
  }

  /// Frees what only the notes need: with many ranks, these are many names.
  void forget_noted_names() {
    differing_ = {};
    untied_ = {};
    beside_tensors_ = {};
    on_some_ranks_.clear();
    other_keys_.clear();
    list_lengths_.clear();
    not_joined_.clear();
  }

  Format format_;
  std::string path_;
  std::vector<RankFile> files_;
  std::map<std::string, Gathered> by_name_;  // only while opening
  CheckpointContents contents_;
  std::vector<std::vector<Origin>> pieces_;  // parallel to contents_.tensors and their pieces
  std::vector<Origin> values_;               // parallel to contents_.values
  // The names that notes count; only while opening.
  std::vector<std::string> differing_;       // names with different copies on some ranks
  std::vector<std::string> untied_;          // names that are aliases on some ranks only
  std::vector<std::string> beside_tensors_;  // names that are values on some ranks only
  std::set<std::string> not_joined_;         // vectors under numbers that are no flat state
  std::set<std::string> on_some_ranks_;      // names that only some ranks have; not sharded ones
  std::map<std::string, int> other_keys_;    // names that have another key path on a rank
  std::map<std::string, std::map<int, std::int64_t>> list_lengths_;  // keys: name of the list, rank
  std::set<std::string> unreadable_;  // tensors that cannot be read on some rank; while opening
  // Of what groups of ranks have under equal names, without the first group.
  std::uint64_t nbytes_of_groups_ = 0;
  std::uint64_t differing_nbytes_of_groups_ = 0;
  bool do_weights_differ_ = false;  // between groups of ranks
  std::optional<std::tuple<std::string, Origin, Origin>> first_differing_;
  std::set<std::int64_t> numels_;   // of whole tensors but numbered state; only while opening
  bool has_replicas_ = false;       // of sharded tensors
  bool has_sharded_ = false;        // some tensor is a DTensor or ShardedTensor
  bool has_sharded_state_ = false;  // some state under a number is a DTensor or ShardedTensor
  std::size_t num_flat_ = 0;        // tensors of flat state
  // Which of contents_.opening_findings are notes of the files' readers.
  std::size_t begin_of_files_notes_ = 0;
  std::size_t end_of_files_notes_ = 0;
};

}  // namespace

std::unique_ptr<CheckpointReader> join_ranks(Format format, std::string path, int world_size,
                                             std::vector<RankFile> files,
                                             std::vector<Finding> notes) {
  return std::make_unique<JoinedRanks>(format, std::move(path), world_size, std::move(files),
                                       std::move(notes));
}

}  // namespace tessera::formats::rank_files
