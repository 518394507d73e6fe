#include "tessera/formats/merge.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/outside_failure.h"
#include "base/value_bits.h"
#include "formats/key_order.h"
#include "formats/known_ranges.h"
#include "formats/merged_sources.h"
#include "formats/opened_classes.h"
#include "formats/partly_read.h"
#include "formats/per_rank.h"
#include "formats/simplified_values.h"
#include "formats/tensor_collision.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

constexpr std::ptrdiff_t kNumOwnKeys = 2;  // `per_rank` and the rank

/// Puts a prefix and a dot before a name. `per_rank.<rank>.<name>` gets them before `<name>`, so
/// that it stays an entry of that rank.
std::string prefixed(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  const auto own = parse_per_rank_name(name);
  const std::size_t begin = own ? name.size() - own->name.size() : 0;
  return name.substr(0, begin) + prefix + "." + name.substr(begin);
}

KeyPath prefixed(const std::string& prefix, const std::string& name, const KeyPath& path) {
  if (prefix.empty()) return path;
  const auto own = parse_per_rank_name(name);
  const bool is_own = own.has_value();
  const bool has_own_keys =
      is_own && std::ssize(path) > kNumOwnKeys &&
      spell(KeyPath(path.begin(), path.begin() + kNumOwnKeys)) + "." + own->name == name;
  if (is_own && !has_own_keys) return {prefixed(prefix, name)};
  KeyPath result = path.empty() ? KeyPath{name} : path;
  result.insert(result.begin() + (is_own ? kNumOwnKeys : 0), prefix);
  return result;
}

class MergedReader final : public CheckpointReader,
                           public PartlyRead,
                           public MergedSources,
                           public KnownRanges,
                           public SimplifiedValues {
 public:
  MergedReader(std::vector<MergeSource> sources, MergePreference preference)
      : sources_(std::move(sources)), preference_(preference) {
    TESSERA_CHECK(!sources_.empty());
    OpenedClassSum opened;
    for (const MergeSource& source : sources_) {
      path_ += (path_.empty() ? "" : " + ") + source.reader->path();
      contents_.world_size = std::max(contents_.world_size, contents_of(source).world_size);
      const auto& missing = contents_of(source).missing_files;
      contents_.missing_files.insert(contents_.missing_files.end(), missing.begin(), missing.end());
      opened.add(contents_of(source).opened_classes);
      for (Simplification simplified : contents_of(source).simplifications) {
        simplified.name =
            simplified.name.empty() ? source.prefix : prefixed(source.prefix, simplified.name);
        contents_.simplifications.push_back(std::move(simplified));
      }
      const auto& findings = contents_of(source).opening_findings;
      contents_.opening_findings.insert(contents_.opening_findings.end(), findings.begin(),
                                        findings.end());
    }
    contents_.opened_classes = opened.classes();
    find_part();
    choose_names();
    leave_out_other_ranks();
    find_nested();
    find_lists_that_are_dicts();
    add_chosen();
    note_preferred();
    for (TensorEntry& tensor : contents_.tensors) find_parameter(tensor);
    add_units();
    add_annotations();
  }

  std::vector<Finding> take_collisions() { return std::move(collisions_); }
  std::size_t num_unordered_dicts() const { return num_unordered_dicts_; }

  Format format() const override { return sources_.front().reader->format(); }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  /// Returns the dict orders of all sources, with the new names. Leaves out entries that the merge
  /// takes from another source.
  std::vector<std::vector<std::string>> dict_orders() const override {
    std::vector<std::vector<std::string>> orders;
    for (std::size_t s = 0; s < sources_.size(); ++s) {
      for (const std::vector<std::string>& order : sources_[s].reader->dict_orders()) {
        std::vector<std::string>& names = orders.emplace_back();
        for (const std::string& name : order) {
          std::string merged = prefixed(sources_[s].prefix, name);
          const auto chosen = std::ranges::lower_bound(chosen_, merged, {}, &Named::name);
          const bool is_chosen = chosen != chosen_.end() && chosen->name == merged;
          if (is_chosen && chosen->origin.source == s) names.push_back(std::move(merged));
        }
      }
    }
    return orders;
  }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Origin& origin = tensors_[tensor_index];
    reader_of(origin).read_piece(origin.index, piece_index, range, out);
  }
  Value read_value(std::size_t value_index) const override {
    const Origin& origin = values_[value_index];
    return reader_of(origin).read_value(origin.index);
  }
  std::vector<Simplification> simplifications_of_value(std::size_t value_index) const override {
    const Origin& origin = values_[value_index];
    return formats::simplifications_of_value(reader_of(origin), origin.index);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const Origin& origin = tensors_[tensor_index];
    PieceStorage storage = reader_of(origin).piece_storage(origin.index, piece_index);
    // Two sources can have files of the same name, so the whole path is shown.
    storage.file = join_path(reader_of(origin).path(), storage.file);
    return storage;
  }
  std::optional<KnownRange> known_range(std::size_t tensor_index,
                                        std::size_t piece_index) const override {
    const Origin& origin = tensors_[tensor_index];
    const auto* const known = dynamic_cast<const KnownRanges*>(&reader_of(origin));
    if (known == nullptr) return std::nullopt;
    return known->known_range(origin.index, piece_index);
  }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for (const MergeSource& source : sources_) {
      for (std::string& file : source.reader->data_files()) files.push_back(std::move(file));
    }
    return files;
  }
  std::span<const MergeSource> merged_sources() const override { return sources_; }
  std::optional<std::size_t> source_of_tensor(std::size_t tensor_index) const override {
    return tensors_[tensor_index].source;
  }
  void check_rest(const RestOptions& options) const override {
    for (const MergeSource& source : sources_) formats::check_rest(*source.reader, options);
  }
  MissingData find_missing_data() const override {
    std::vector<MissingData> missing;  // indexed by source
    for (const MergeSource& source : sources_)
      missing.push_back(source.reader->find_missing_data());
    const auto in_source = [&](const Origin& origin, const std::string& file) {
      return join_path(reader_of(origin).path(), file);  // two sources may have equal names
    };
    MissingData result;
    for (std::size_t v = 0; v < values_.size(); ++v) {
      const auto& lost = missing[values_[v].source].values;
      const auto found = lost.find(values_[v].index);
      if (found != lost.end()) result.values.emplace(v, in_source(values_[v], found->second));
    }
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const auto& lost = missing[tensors_[t].source].pieces;
      const auto found = lost.find(tensors_[t].index);
      if (found == lost.end()) continue;
      for (const auto& [piece, file] : found->second) {
        result.pieces[t].emplace(piece, in_source(tensors_[t], file));
      }
    }
    return result;
  }
  void check_files(const FindingSink& sink) const override {
    for (const MergeSource& source : sources_) source.reader->check_files(sink);
  }
  void verify(const FindingSink& sink, const ProgressSink& progress,
              int num_threads) const override {
    for (const MergeSource& source : sources_) source.reader->verify(sink, progress, num_threads);
  }

 private:
  /// A tensor or a value of a source.
  struct Origin {
    std::size_t source;
    std::size_t index;
    friend auto operator<=>(const Origin&, const Origin&) = default;
  };
  enum class EntryKind { tensor, value, alias };
  /// An entry of a source under its new name.
  struct Named {
    std::string name;
    EntryKind kind;
    Origin origin;
    std::vector<PlaceInSource> places;  // of this name, in all sources that have it
  };

  static const CheckpointContents& contents_of(const MergeSource& source) {
    return source.reader->contents();
  }
  const CheckpointReader& reader_of(const Origin& origin) const {
    return *sources_[origin.source].reader;
  }
  const std::string& prefix_of(const Origin& origin) const {
    return sources_[origin.source].prefix;
  }

  std::vector<Named> all_names() const {
    std::vector<Named> all;
    for (std::size_t s = 0; s < sources_.size(); ++s) {
      const CheckpointContents& contents = contents_of(sources_[s]);
      const auto add = [&](EntryKind kind, const std::string& name, std::size_t index,
                           std::uint32_t dict_order) {
        all.push_back({prefixed(sources_[s].prefix, name), kind, {s, index}, {{s, dict_order}}});
      };
      for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
        add(EntryKind::tensor, contents.tensors[i].meta.fqn, i, contents.tensors[i].dict_order);
      }
      for (std::size_t i = 0; i < contents.values.size(); ++i) {
        add(EntryKind::value, contents.values[i].name, i, contents.values[i].dict_order);
      }
      for (std::size_t i = 0; i < contents.aliases.size(); ++i) {
        add(EntryKind::alias, contents.aliases[i].fqn, i, contents.aliases[i].dict_order);
      }
    }
    std::ranges::stable_sort(all, {}, &Named::name);  // equal names stay in source order
    return all;
  }

  void choose_names() {
    std::vector<Named> all = all_names();
    for (std::size_t begin = 0; begin < all.size();) {
      std::size_t end = begin + 1;
      while (end < all.size() && all[end].name == all[begin].name) ++end;
      if (end - begin > 1) note_collision(std::span(all).subspan(begin, end - begin));
      const std::size_t chosen = preference_ == MergePreference::last ? end - 1 : begin;
      if (all[chosen].kind == EntryKind::tensor) {
        new_names_.emplace(all[chosen].origin, all[chosen].name);
      }
      for (std::size_t i = begin; i < end; ++i) {
        if (i != chosen) all[chosen].places.push_back(all[i].places.front());
      }
      chosen_.push_back(std::move(all[chosen]));
      begin = end;
    }
  }

  /// Leaves out `per_rank.3.rng` of a source if the preference takes `rng`, or something inside or
  /// around it, from another source. If that source has fewer ranks, or equal entries on all ranks,
  /// it has no `per_rank.3.rng`, and the merge would mix the ranks of two runs. See
  /// [Note: Entries of each rank].
  void leave_out_other_ranks() {
    if (preference_ == MergePreference::none) return;
    std::set<std::string> left;
    for (const Named& named : chosen_) {
      const auto own = parse_per_rank_name(named.name);
      if (!own) continue;
      const std::size_t source = named.origin.source;
      const auto is_of_another = [&](const Named& shared) {
        const bool has_both =
            std::ranges::find(shared.places, source, &PlaceInSource::source) != shared.places.end();
        return has_both && shared.origin.source != source;
      };
      const std::vector<const Named*> shared = shared_by_ranks(own->name);
      if (std::ranges::any_of(shared, is_of_another, [](auto* each) -> auto& { return *each; })) {
        left.insert(named.name);
      }
    }
    std::erase_if(chosen_, [&](const Named& named) {
      if (!left.contains(named.name)) return false;
      if (named.kind == EntryKind::tensor) new_names_.erase(named.origin);
      return true;
    });
    other_ranks_.assign(left.begin(), left.end());
  }

  /// Returns the chosen entries that ranks without `per_rank.<rank>.<name>` have in its place: the
  /// entry `name`, those in a dict or list of this name, and the entry that has `name` inside.
  std::vector<const Named*> shared_by_ranks(std::string name) const {
    std::vector<const Named*> found;
    const auto add = [&](const std::string& wanted) {
      const auto at = std::ranges::lower_bound(chosen_, wanted, {}, &Named::name);
      if (at != chosen_.end() && at->name == wanted) found.push_back(&*at);
    };
    add(name);
    const std::string start = name + ".";
    auto inner = std::ranges::lower_bound(chosen_, start, {}, &Named::name);
    for (; inner != chosen_.end() && inner->name.starts_with(start); ++inner) {
      found.push_back(&*inner);
    }
    while (name.find('.') != std::string::npos) {
      name.resize(name.rfind('.'));
      add(name);
    }
    return found;
  }

  /// Finds entries of one source within which another source has entries, such as a value `s` and a
  /// tensor `s.w`. Leaves out the outer entry; reports a collision, unless this entry is an empty
  /// dict.
  void find_nested() {
    std::vector<Named> kept;
    for (Named& named : chosen_) {
      const Named* const inner = first_within(named);
      if (inner == nullptr) {
        kept.push_back(named);
        continue;
      }
      // An alias of a tensor that is left out becomes a tensor (`add_alias`).
      if (named.kind == EntryKind::tensor) new_names_.erase(named.origin);
      if (!is_empty_dict(named)) {
        collide(named.name, "either a dict or another entry in all sources",
                "a dict with '" + printable(inner->name) + "' in " +
                    printable(reader_of(inner->origin).path()) + ", and " +
                    (named.kind == EntryKind::value ? "a value" : "a tensor") + " in " +
                    printable(reader_of(named.origin).path()),
                Remedy{});
      }
    }
    chosen_ = std::move(kept);
  }

  /// Returns the first entry of another source that is inside the entry `outer`, as `s.w` is inside
  /// `s`; null if there is none.
  const Named* first_within(const Named& outer) const {
    const std::string start = outer.name + ".";
    auto inner = std::ranges::lower_bound(chosen_, start, {}, &Named::name);
    if (inner == chosen_.end() || !inner->name.starts_with(start)) return nullptr;
    KeyPath path = path_of(outer);
    if (path.empty()) path.emplace_back(outer.name);
    for (; inner != chosen_.end() && inner->name.starts_with(start); ++inner) {
      if (inner->origin.source == outer.origin.source) continue;
      const KeyPath other = path_of(*inner);
      if (other.size() > path.size() && std::equal(path.begin(), path.end(), other.begin())) {
        return &*inner;
      }
    }
    return nullptr;
  }

  /// Reports each list of one source that is a dict in another source. No nested format could hold
  /// what the merge would make of them.
  void find_lists_that_are_dicts() {
    std::map<KeyPath, const Named*> lists;  // value: an entry of the list
    for (const Named& named : chosen_) {
      const KeyPath path = path_of(named);
      for (std::size_t depth = num_own_keys(named); depth < path.size(); ++depth) {
        if (!std::holds_alternative<std::int64_t>(path[depth])) continue;
        lists.emplace(KeyPath(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(depth)),
                      &named);
      }
    }
    for (const auto& [list, item] : lists) {
      const Named* const other = first_in_dict(list, item->origin.source);
      if (other == nullptr) continue;
      collide(spell(list),
              "either a list or a dict " +
                  std::string(list.empty() ? "as the outermost object " : "") + "in all sources",
              "a list in " + printable(reader_of(item->origin).path()) + ", and a dict with '" +
                  printable(other->name) + "' in " + printable(reader_of(other->origin).path()),
              Remedy{});
    }
  }

  /// Returns the first entry of another source in which `list` is a dict; else null.
  const Named* first_in_dict(const KeyPath& list, std::size_t source) const {
    const std::string start = list.empty() ? "" : spell(list) + ".";
    auto next = std::ranges::lower_bound(chosen_, start, {}, &Named::name);
    for (; next != chosen_.end() && next->name.starts_with(start); ++next) {
      if (next->origin.source == source || list.size() < num_own_keys(*next)) continue;
      KeyPath path = path_of(*next);
      if (path.empty()) path.emplace_back(next->name);
      const bool is_inside =
          path.size() > list.size() && std::equal(list.begin(), list.end(), path.begin());
      if (is_inside && !std::holds_alternative<std::int64_t>(path[list.size()])) return &*next;
    }
    return nullptr;
  }

  /// Returns how many keys stand before an entry's path in the saved object: `per_rank` and the
  /// rank.
  static std::size_t num_own_keys(const Named& named) {
    return parse_per_rank_name(named.name) ? std::size_t{kNumOwnKeys} : 0;
  }

  bool is_empty_dict(const Named& named) const {
    if (named.kind != EntryKind::value) return false;
    try {
      const Value value = reader_of(named.origin).read_value(named.origin.index);
      const auto* const dict = value.get_if<Value::Dict>();
      return dict != nullptr && dict->empty();
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return false;
    }
  }

  /// Reports entries that have the same name. If there is a preference, does not report them, but
  /// remembers the names of entries that differ, for a note.
  void note_collision(std::span<const Named> entries) {
    std::string found;
    for (const Named& entry : entries) {
      found += (found.empty() ? "" : ", ") + printable(reader_of(entry.origin).path());
    }
    if (have_different_keys(entries)) different_keys_.push_back(entries.front().name);
    const TensorCollision kind = compare(entries);
    const std::string& name = entries.front().name;
    if (preference_ != MergePreference::none) {
      if (kind == TensorCollision::parts) parts_.push_back(name);
      if (kind == TensorCollision::different) {
        (has_value(entries) ? different_values_ : different_).push_back(name);
      }
    } else if (kind == TensorCollision::parts) {
      collide(name, "one source with that name",
              found + ": the parts of one tensor, which a merge does not join", {});
    } else {
      if (kind == TensorCollision::different && !has_value(entries))
        found += ", with different bytes: versions of one tensor, or its parts";
      collide(name, "one source with that name", std::move(found));
    }
  }

  KeyPath path_of(const Named& entry) const {
    const CheckpointContents& from = reader_of(entry.origin).contents();
    const std::size_t index = entry.origin.index;
    switch (entry.kind) {
      case EntryKind::tensor:
        return prefixed(prefix_of(entry.origin), from.tensors[index].meta.fqn,
                        from.tensors[index].key_path);
      case EntryKind::value:
        return prefixed(prefix_of(entry.origin), from.values[index].name,
                        from.values[index].key_path);
      case EntryKind::alias:
        return prefixed(prefix_of(entry.origin), from.aliases[index].fqn,
                        from.aliases[index].key_path);
    }
    return {};
  }

  /// Whether entries of one name have keys of different types in their key paths, such as 0 and
  /// "0".
  bool have_different_keys(std::span<const Named> entries) const {
    const KeyPath first = path_of(entries.front());
    return std::ranges::any_of(entries, [&](const Named& entry) {
      const KeyPath path = path_of(entry);
      return path.size() == first.size() && path != first;
    });
  }

  /// Adds a note about lists that have different lengths in several sources. The merge takes each
  /// item from the source that the preference chooses, so such a list is a mixture.
  void note_lists() {
    if (preference_ == MergePreference::none) return;
    std::map<std::string, std::set<std::int64_t>> lengths;  // key: list's name
    for (const MergeSource& source : sources_) {
      for (const auto& [name, length] : lists_of(source)) lengths[name].insert(length);
    }
    std::vector<std::string> names;
    for (const auto& [name, found] : lengths) {
      if (found.size() > 1) names.push_back(name.empty() ? "the outermost list" : name);
    }
    note(names, "lists of different lengths, which are mixed item by item",
         "lists of one length under one name");
  }

  /// Returns the lengths of the lists whose items are entries, by the lists' new names.
  static std::map<std::string, std::int64_t> lists_of(const MergeSource& source) {
    std::map<std::string, std::int64_t> lengths;
    const auto add = [&](const KeyPath& path) {
      for (std::size_t i = 0; i < path.size(); ++i) {
        const auto* const place = std::get_if<std::int64_t>(&path[i]);
        if (place == nullptr) continue;
        const auto end = path.begin() + static_cast<std::ptrdiff_t>(i);
        const std::string list = spell(KeyPath(path.begin(), end));
        std::int64_t& length =
            lengths[list.empty() ? source.prefix : prefixed(source.prefix, list)];
        length = std::max(length, *place + 1);
      }
    };
    const CheckpointContents& contents = contents_of(source);
    for (const TensorEntry& tensor : contents.tensors) add(tensor.key_path);
    for (const ValueEntry& value : contents.values) add(value.key_path);
    for (const Alias& alias : contents.aliases) add(alias.key_path);
    return lengths;
  }

  /// Adds a note about sources without any entry, such as a file with an empty dict. The merge
  /// takes nothing from them.
  void note_empty_sources() {
    std::vector<std::string> paths;
    for (const MergeSource& source : sources_) {
      const CheckpointContents& contents = contents_of(source);
      if (contents.tensors.empty() && contents.values.empty())
        paths.push_back(source.reader->path());
    }
    note(paths, "a source without any", "a tensor or a value in each source");
  }

  /// Returns the tensor of the merge that a name stands for: the name itself, or the target of an
  /// alias. Returns nothing if the name is neither a tensor nor an alias.
  std::optional<std::string> tensor_named(const std::string& name) const {
    if (contents_.find_tensor(name) != nullptr) return name;
    const auto alias = std::ranges::lower_bound(contents_.aliases, name, {}, &Alias::fqn);
    if (alias == contents_.aliases.end() || alias->fqn != name) return std::nullopt;
    return alias->target;
  }

  /// Adds a note about tied tensors of one source that are no longer tied in the merge, because one
  /// of their names is taken from another source.
  void note_split_ties() {
    std::set<std::string> names;
    for (const MergeSource& source : sources_) {
      for (const Alias& alias : contents_of(source).aliases) {
        const std::string name = prefixed(source.prefix, alias.fqn);
        const auto own = tensor_named(name);
        const auto other = tensor_named(prefixed(source.prefix, alias.target));
        if (own && other && *own != *other) names.insert(name);
      }
    }
    note({names.begin(), names.end()},
         "tied tensors that become separate, because one is taken from another source",
         "tied tensors that stay tied");
  }

  static bool has_value(std::span<const Named> entries) {
    return std::ranges::any_of(entries,
                               [](const Named& entry) { return entry.kind == EntryKind::value; });
  }

  /// Compares entries of one name: tensors (an alias counts as its tensor) or values.
  TensorCollision compare(std::span<const Named> entries) const {
    std::vector<TensorOfSource> tensors;
    std::vector<const Named*> values;
    for (const Named& entry : entries) {
      if (entry.kind == EntryKind::value) {
        values.push_back(&entry);
      } else {
        tensors.push_back({&reader_of(entry.origin), tensor_of(entry)});
      }
    }
    if (values.empty()) {
      return compare_tensors(tensors, preference_ == MergePreference::none ? ComparedBytes::first
                                                                           : ComparedBytes::all);
    }
    const bool are_equal = tensors.empty() && std::ranges::all_of(values, [&](const Named* value) {
                             return have_equal_values(*value, *values.front());
                           });
    return are_equal ? TensorCollision::equal : TensorCollision::different;
  }

  /// Returns the index of the tensor that an entry names. Requires: it is no value.
  std::size_t tensor_of(const Named& entry) const {
    if (entry.kind == EntryKind::tensor) return entry.origin.index;
    const CheckpointContents& contents = reader_of(entry.origin).contents();
    const TensorEntry* const target =
        contents.find_tensor(contents.aliases[entry.origin.index].target);
    TESSERA_CHECK(target != nullptr);  // the reader checked it
    return static_cast<std::size_t>(target - contents.tensors.data());
  }

  /// Whether two values are equal. A value that is damaged or unsupported equals only itself.
  /// Throws: Error(io).
  bool have_equal_values(const Named& a, const Named& b) const {
    if (&a == &b) return true;
    try {
      return tessera::detail::have_equal_bits(reader_of(a.origin).read_value(a.origin.index),
                                              reader_of(b.origin).read_value(b.origin.index));
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return false;
    }
  }

  /// Adds a note about `names`, for which the preference chose a source. Adds none if `names` is
  /// empty.
  void note(const std::vector<std::string>& names, const std::string& found,
            const std::string& expected = "equal tensors and values under one name") {
    if (names.empty()) return;
    const std::string others =
        names.size() == 1 ? "" : " and " + std::to_string(names.size() - 1) + " more";
    contents_.opening_findings.push_back(
        {.severity = Finding::Severity::note,
         .rule = "merge",
         .where = {.path = path_},
         .expected = expected,
         .found = found + ": '" + printable(names.front()) + "'" + others});
  }

  /// Adds a note for each kind of difference between sources that the preference decided.
  void note_preferred() {
    note(parts_,
         "tensors that look like parts of one tensor (one part is taken, the others are lost; to "
         "keep all, give the folder of all ranks as one source)");
    note(different_,
         "different bytes, as of versions or parts of one tensor (one tensor is taken)");
    note(different_values_, "different values, or a value and a tensor (one entry is taken)");
    note(other_ranks_,
         "entries of single ranks, whose shared entry is taken from another source (left out)",
         "the same ranks with an entry of their own in all sources");
    note_lists();
    note_empty_sources();
    if (preference_ == MergePreference::none) return;  // collisions are refused
    note(different_keys_, "keys of different types, such as 0 and \"0\" (one entry is taken)",
         "the same keys under one name");
    note_split_ties();
  }

  void collide(std::string name, std::string expected, std::string found,
               Remedy remedy = {Remedy::Action::choose_source}) {
    collisions_.push_back({.severity = Finding::Severity::error,
                           .rule = "merge",
                           .where = {.fqn = std::move(name)},
                           .expected = std::move(expected),
                           .found = std::move(found),
                           .remedy = std::move(remedy)});
  }

  /// Gives the entries the order of keys that the sources have. `places`: of all entries. The merge
  /// has no order if no source has one.
  void merge_orders(const std::vector<std::vector<PlaceInSource>>& places) {
    const auto has_order = [](const std::vector<PlaceInSource>& of_entry) {
      return std::ranges::any_of(of_entry,
                                 [](const PlaceInSource& place) { return place.dict_order > 0; });
    };
    if (std::ranges::none_of(places, has_order)) return;
    std::vector<std::size_t> root_depths;
    for (const MergeSource& source : sources_) root_depths.push_back(source.prefix.empty() ? 0 : 1);
    num_unordered_dicts_ = merge_key_orders(contents_, places, root_depths);
  }

  /// Fills the lists of `contents_`. The lists are sorted by name, because `chosen_` is sorted.
  void add_chosen() {
    using Places = std::vector<std::vector<PlaceInSource>>;
    Places places;  // of the tensors, then of all entries
    Places of_aliases;
    Places of_values;
    for (Named& named : chosen_) {
      const CheckpointContents& from = reader_of(named.origin).contents();
      const std::string& prefix = prefix_of(named.origin);
      if (named.kind == EntryKind::tensor) {
        const TensorEntry& tensor = from.tensors[named.origin.index];
        add_tensor(named.origin, named.name, prefixed(prefix, tensor.meta.fqn, tensor.key_path));
        places.push_back(std::move(named.places));
      } else if (named.kind == EntryKind::value) {
        const ValueEntry& value = from.values[named.origin.index];
        contents_.values.push_back({named.name, prefixed(prefix, value.name, value.key_path)});
        values_.push_back(named.origin);
        of_values.push_back(std::move(named.places));
      } else {
        const bool is_alias = add_alias(named);
        (is_alias ? of_aliases : places).push_back(std::move(named.places));
      }
    }
    std::ranges::move(of_aliases, std::back_inserter(places));
    std::ranges::move(of_values, std::back_inserter(places));
    merge_orders(places);
  }

  void add_tensor(const Origin& origin, const std::string& name, KeyPath key_path) {
    TensorEntry tensor = reader_of(origin).contents().tensors[origin.index];
    tensor.meta.fqn = name;
    tensor.key_path = std::move(key_path);
    tensor.dict_order = 0;
    contents_.tensors.push_back(std::move(tensor));
    tensors_.push_back(origin);
  }

  /// Adds an alias or, if the merge does not take its target, a tensor. Returns whether it is an
  /// alias.
  bool add_alias(const Named& named) {
    const CheckpointContents& from = reader_of(named.origin).contents();
    const Alias& alias = from.aliases[named.origin.index];
    KeyPath key_path = prefixed(prefix_of(named.origin), alias.fqn, alias.key_path);
    const TensorEntry* target = from.find_tensor(alias.target);
    TESSERA_CHECK(target != nullptr);  // the reader checked it
    const Origin target_origin{named.origin.source,
                               static_cast<std::size_t>(target - from.tensors.data())};
    const auto [kept, is_lost] = new_names_.try_emplace(target_origin, named.name);
    if (is_lost) {
      add_tensor(target_origin, named.name, std::move(key_path));
    } else {
      contents_.aliases.push_back({named.name, kept->second, std::move(key_path)});
    }
    return !is_lost;
  }

  void find_parameter(TensorEntry& tensor) const {
    if (tensor.parameter.empty()) return;
    const auto index = static_cast<std::size_t>(&tensor - contents_.tensors.data());
    const std::string own = prefixed(prefix_of(tensors_[index]), tensor.parameter);
    std::optional<std::string> found = tensor_named(own);
    for (const MergeSource& source : sources_) {
      if (!found) found = tensor_named(prefixed(source.prefix, tensor.parameter));
    }
    tensor.parameter = found.value_or(own);
  }

  /// Adds the units of all sources, except those with a parameter that comes from another source or
  /// is in another unit already.
  void add_units() {
    std::set<std::string> in_units;
    for (std::size_t s = 0; s < sources_.size(); ++s) {
      const std::string& prefix = sources_[s].prefix;
      for (FlatUnit unit : contents_of(sources_[s]).units) {
        unit.name = unit.name.empty() ? prefix : prefixed(prefix, unit.name);
        bool is_whole = true;
        for (FlatUnitParameter& parameter : unit.parameters) {
          parameter.fqn = prefixed(prefix, parameter.fqn);
          is_whole = is_whole && !in_units.contains(parameter.fqn) &&
                     !is_taken_from_other(parameter.fqn, s);
        }
        if (!is_whole) continue;
        for (const FlatUnitParameter& parameter : unit.parameters) in_units.insert(parameter.fqn);
        contents_.units.push_back(std::move(unit));
      }
    }
  }
  bool is_taken_from_other(const std::string& fqn, std::size_t source) const {
    const TensorEntry* tensor = contents_.find_tensor(fqn);
    return tensor != nullptr &&
           tensors_[static_cast<std::size_t>(tensor - contents_.tensors.data())].source != source;
  }

  /// Sets `contents_.part` from the first source that is only a part of a checkpoint. Sources that
  /// together are all files of a series are a whole, not parts.
  void find_part() {
    std::map<std::string, std::set<std::uint64_t>> numbers;  // key: series
    for (const MergeSource& source : sources_) {
      const std::optional<PartOfWhole>& part = contents_of(source).part;
      if (part && !part->series.empty()) numbers[part->series].insert(part->number);
    }
    for (const MergeSource& source : sources_) {
      const std::optional<PartOfWhole>& part = contents_of(source).part;
      const bool is_completed =
          part && !part->series.empty() && numbers[part->series].size() == part->num_parts;
      if (part && !is_completed && !contents_.part) contents_.part = part;
    }
  }

  void add_annotations() {
    std::map<std::string, const std::string*> origins;  // value: the path of the source
    std::set<std::string> different;
    for (const MergeSource& source : sources_) {
      const std::string& path = source.reader->path();
      for (const auto& [key, text] : contents_of(source).annotations) {
        const auto [known, is_new] = contents_.annotations.emplace(key, text);
        if (is_new) origins.emplace(key, &path);
        if (is_new || known->second == text) continue;
        if (preference_ == MergePreference::none) {
          collide(key, "the same annotation in all sources",
                  "'" + printable(known->second) + "' in " + printable(*origins[key]) + ", '" +
                      printable(text) + "' in " + printable(path),
                  {Remedy::Action::prefer_source});
          continue;
        }
        different.insert(key);
        if (preference_ == MergePreference::last) known->second = text;
      }
    }
    note({different.begin(), different.end()}, "different texts (one text is taken)",
         "equal texts under one key");
  }

  std::vector<MergeSource> sources_;
  MergePreference preference_;
  std::string path_;
  CheckpointContents contents_;
  std::vector<Origin> tensors_;          // parallel to contents_.tensors
  std::vector<Origin> values_;           // parallel to contents_.values
  std::size_t num_unordered_dicts_ = 0;  // that lose the order of their keys
  std::vector<Finding> collisions_;
  std::vector<std::string> parts_;      // names of tensors of which only one part was chosen
  std::vector<std::string> different_;  // names of different tensors, of which one was chosen
  std::vector<std::string>
      different_values_;                  // names of different values, or of a value and a tensor
  std::vector<std::string> other_ranks_;  // `per_rank.3.rng` whose `rng` another source gives
  std::vector<std::string> different_keys_;  // names whose keys have different types
  std::vector<Named> chosen_;                // sorted by name
  std::map<Origin, std::string> new_names_;  // of the tensors that are kept
};

}  // namespace

std::span<const MergeSource> sources_of_merge(const CheckpointReader& reader) {
  const auto* const merged = dynamic_cast<const MergedSources*>(&reader);
  return merged == nullptr ? std::span<const MergeSource>() : merged->merged_sources();
}

std::optional<std::size_t> source_of_tensor(const CheckpointReader& reader,
                                            std::size_t tensor_index) {
  const auto* const merged = dynamic_cast<const MergedSources*>(&reader);
  return merged == nullptr ? std::nullopt : merged->source_of_tensor(tensor_index);
}

MergedCheckpoint merge_checkpoints(std::vector<MergeSource> sources, MergePreference preference) {
  auto reader = std::make_unique<MergedReader>(std::move(sources), preference);
  std::vector<Finding> collisions = reader->take_collisions();
  const std::size_t num_unordered_dicts = reader->num_unordered_dicts();
  return {std::move(reader), std::move(collisions), num_unordered_dicts};
}

MergedCheckpoint open_merged(const FileSystem& fs, const std::vector<MergePath>& paths,
                             MergePreference preference, const std::vector<std::string>& as_dict) {
  std::vector<MergeSource> sources;
  for (const MergePath& path : paths) {
    MergeSource source{open_checkpoint(fs, path.path, {.as_dict = as_dict}), path.prefix};
    if (source.prefix.ends_with('.')) source.prefix.pop_back();
    sources.push_back(std::move(source));
  }
  return merge_checkpoints(std::move(sources), preference);
}

}  // namespace tessera::formats
