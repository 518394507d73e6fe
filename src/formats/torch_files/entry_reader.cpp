#include "formats/torch_files/entry_reader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "base/size_text.h"
#include "base/value_bits.h"
#include "formats/distinct_names.h"
#include "formats/opened_classes.h"
#include "formats/part_of_check.h"
#include "formats/per_rank.h"
#include "formats/torch_files/rank_containers.h"
#include "formats/torch_zip/equal_bytes.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_files {
namespace {

/// Returns an integer from 0 to 2^24 as a float32, which holds it exactly; nothing for all other
/// values.
std::optional<float> as_float(const std::optional<Value>& value) {
  constexpr std::int64_t kMax = std::int64_t{1} << std::numeric_limits<float>::digits;
  const auto* const number = value ? value->get_if<std::int64_t>() : nullptr;
  if (number == nullptr || *number < 0 || *number > kMax) return std::nullopt;
  return static_cast<float>(*number);
}

/// Returns the key path of an entry; an empty one if it has a single key, which is its name.
KeyPath without_name(KeyPath path) {
  const bool is_name = path.size() == 1 && std::holds_alternative<std::string>(path.front());
  return is_name ? KeyPath() : std::move(path);
}

/// An entry and the file that it is in.
struct Origin {
  const File* file;
  const Entry* entry;
};

std::vector<std::string> with_records(std::vector<std::string> as_dict, const Family& family) {
  as_dict.insert(as_dict.end(), family.records.begin(), family.records.end());
  return as_dict;
}

}  // namespace

void refuse(const File& file, const std::string& name, const std::string& rule,
            const std::string& expected, const std::string& found) {
  throw Error::expected(ErrorKind::corruption, {.path = file.reader().path(), .fqn = name}, rule,
                        expected, found, "files of different runs?");
}

bool are_equal(const File& file, const Entry& entry, const File& other_file, const Entry& other) {
  if (entry.kind != other.kind) return false;
  if (entry.kind == Entry::Kind::tensor) {
    return torch_zip::are_equal(file.reader(), entry.index, other_file.reader(), other.index);
  }
  const auto value = file.value_of(entry);
  const auto other_value = other_file.value_of(other);
  if (!value || !other_value) return !value && !other_value;
  return tessera::detail::have_equal_bits(*value, *other_value);
}

KeyPath text_keys(const Path& path) {
  return KeyPath(path.begin(), path.end());
}

EntryReader::EntryReader(const FileSystem& fs, std::string path, std::string folder,
                         const std::vector<std::string>& as_dict, const Family& family)
    : fs_(fs),
      family_(family),
      path_(std::move(path)),
      folder_(std::move(folder)),
      as_dict_(with_records(as_dict, family)) {}

const File& EntryReader::open_file(const std::string& name) {
  const File& file = files_.emplace_back(fs_, folder_, name, as_dict_, paths_);
  if (family_.check != nullptr) family_.check(file);
  if (!family_.keeps_key_order) return file;
  order_begins_.emplace(&file, order_end_);
  std::uint32_t last = 0;
  for (const Entry& entry : file.entries()) last = std::max(last, entry.dict_order);
  order_end_ += last;
  return file;
}

std::uint32_t EntryReader::order_in(const File& file, std::uint32_t order) const {
  return family_.keeps_key_order ? order_begins_.at(&file) + order : 0;
}

File EntryReader::look_at(const std::string& name) const {
  File file(fs_, folder_, name, as_dict_, std::make_shared<PathPool>());
  if (family_.check != nullptr) family_.check(file);
  return file;
}

std::size_t EntryReader::add_small_file(std::string name) {
  small_files_.push_back(std::move(name));
  return small_files_.size() - 1;
}

/// Opens a small file. Its checks continue those of earlier reads.
File EntryReader::open_small_file(std::size_t number) const {
  File file = look_at(small_files_[number]);
  file.reader().continue_checks(checks_of_small_files_.of(number));
  return file;
}

/// Opens the small file that `source` names, and returns it. Throws Error(corruption) if its tensor
/// has another dtype or numel than when the checkpoint was opened. Does not compare the bytes.
std::shared_ptr<const File> EntryReader::small_file(std::size_t tensor_index,
                                                    const Source& source) const {
  const std::string& name = small_files_[*source.small_file];
  auto file = opened_small_files_.get(*source.small_file, [&] {
    return std::make_unique<File>(open_small_file(*source.small_file));
  });
  const TensorMeta& expected = contents_.tensors[tensor_index].meta;
  const auto& found = file->reader().contents().tensors;
  const bool is_same = source.tensor < found.size() &&
                       found[source.tensor].meta.dtype == expected.dtype &&
                       found[source.tensor].meta.numel() == expected.numel();
  if (is_same) return file;
  throw Error::expected(ErrorKind::corruption,
                        {.path = join_path(folder_, name), .fqn = expected.fqn}, "file",
                        "the tensor that was there when the checkpoint was opened",
                        "another tensor", "did another program write it meanwhile?");
}

void EntryReader::read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                             std::span<std::byte> out) const {
  const Source& source = sources_[tensor_index][piece_index];
  if (source.number) {
    TESSERA_CHECK(out.size() == sizeof(float) && range.numel() == 1);
    std::memcpy(out.data(), &*source.number, sizeof(float));
    return;
  }
  const FlatRange elements{source.begin + range.begin, source.begin + range.end};
  if (source.small_file) {
    const std::shared_ptr<const File> file = small_file(tensor_index, source);
    file->reader().read_piece(source.tensor, 0, elements, out);
    checks_of_small_files_.keep(*source.small_file, file->reader().checks());
  } else {
    source.file->reader().read_piece(source.tensor, 0, elements, out);
  }
}

Value EntryReader::read_value(std::size_t value_index) const {
  const AnyValueSource& source = value_sources_[value_index];
  if (const auto* const value = std::get_if<Value>(&source)) return *value;
  if (const auto* const refusal = std::get_if<std::unique_ptr<const Error>>(&source)) {
    throw Error(**refusal);
  }
  const auto& [file, index] = std::get<ValueSource>(source);
  return file->reader().read_value(index);
}

PieceStorage EntryReader::piece_storage(std::size_t tensor_index, std::size_t piece_index) const {
  const TensorEntry& tensor = contents_.tensors[tensor_index];
  const Source& source = sources_[tensor_index][piece_index];
  PieceStorage storage{.file = {}, .byte_range = {}, .encoding = "plain"};
  if (!source.number) {
    storage = source.small_file
                  ? small_file(tensor_index, source)->reader().piece_storage(source.tensor, 0)
                  : source.file->reader().piece_storage(source.tensor, 0);
  }
  storage.file = source.small_file ? small_files_[*source.small_file] : source.file->name();
  if (folder_ != path_) storage.file = join_path(last_component(folder_), storage.file);
  storage.stored_nbytes = nbytes_of(tensor.pieces[piece_index].region, tensor.meta.dtype);
  if (storage.byte_range) {
    storage.byte_range->begin +=
        static_cast<std::uint64_t>(source.begin) * itemsize(tensor.meta.dtype);
    storage.byte_range->end = storage.byte_range->begin + storage.stored_nbytes;
  }
  return storage;
}

std::vector<std::string> EntryReader::data_files() const {
  std::vector<std::string> files;
  for (const File& file : files_) files.push_back(file.reader().path());
  for (const std::string& name : small_files_) files.push_back(join_path(folder_, name));
  return files;
}

void EntryReader::check_rest(const RestOptions& options) const {
  for (const File& file : files_) formats::check_rest(file.reader(), options);
  for (const std::uint64_t number : checks_of_small_files_.files_to_check(options.most_rest)) {
    const File file = open_small_file(number);
    formats::check_rest(file.reader(), options);
  }
}

/// Adds the names of classes and functions in a file that are not the framework's own.
void EntryReader::add_foreign_names(const File& file, CountedNote& note) const {
  for (std::string& name : file.reader().foreign_names()) {
    const bool is_own = std::ranges::any_of(
        family_.own_names, [&](const std::string& begin) { return name.starts_with(begin); });
    if (!is_own) note.add_name(std::move(name));
  }
}

void EntryReader::verify_part(const FindingSink& sink, const ProgressSink& progress,
                              int num_threads, PartOfCheck& part) const {
  // Leaves out the notes of the files' readers: they are about details of the framework's files,
  // which this reader handles.
  const auto without_notes = [&](const Finding& finding) {
    if (finding.severity == Finding::Severity::error) sink(finding);
  };
  const std::size_t num_notes = part.notes().size();
  for (const File& file : files_) {
    formats::verify_part(file.reader(), without_notes, progress, num_threads, part);
  }
  part.drop_notes(num_notes);
  CountedNote foreign{.kind = CountedNote::Kind::foreign_names, .path = folder_};
  for (const File& file : files_) add_foreign_names(file, foreign);
  for (const std::string& name : small_files_) {
    if (!part.takes(fs_.open(join_path(folder_, name))->nbytes())) continue;
    const File file = look_at(name);
    add_foreign_names(file, foreign);
    file.reader().verify(without_notes, progress, num_threads);
  }
  part.report(std::move(foreign), sink);
  if (part.takes(0)) {
    for (const Finding& finding : contents_.opening_findings) {
      const bool is_done_below = std::ranges::any_of(
          compared_, [&](const Copies* copies) { return copies->is_about_rest(finding); });
      if (!is_done_below) sink(finding);
    }
  }
  for (const Copies* const copies : compared_) {
    if (!part.takes(copies->rest_nbytes())) continue;
    for (const Finding& finding : copies->compare_rest(path_)) sink(finding);
  }
}

void EntryReader::compare(Copies& copies) {
  for (Finding& finding : copies.compare(path_)) {
    contents_.opening_findings.push_back(std::move(finding));
  }
  compared_.push_back(&copies);
}

EntryReader::Tensor EntryReader::named(KeyPath path) {
  Tensor tensor;
  tensor.entry.meta.fqn = spell(path);
  tensor.entry.key_path = without_name(std::move(path));
  return tensor;
}

void EntryReader::add(Tensor tensor) {
  TensorEntry& entry = tensor.entry;
  validate_tensor_meta(entry.meta, folder_);
  const KeyPath& path = entry.key_path;
  entry.dict_order = place_of(path.empty() ? KeyPath{entry.meta.fqn} : path, entry.dict_order);
  tensor.entry.pieces = pieces_pool_.share(std::move(tensor.entry.pieces));
  tensors_.push_back(std::move(tensor));
}

void EntryReader::add_entry(KeyPath path, const File& file, const Entry& entry, int rank) {
  renamed_.push_back({&file, entry.keys, spell(path)});
  const std::uint32_t order = order_in(file, entry.dict_order);
  if (entry.kind == Entry::Kind::value) {
    add_value(std::move(path), ValueSource{&file, entry.index}, order);
    return;
  }
  Tensor tensor = named(std::move(path));
  tensor.entry.dict_order = order;
  tensor.entry.meta.shape = file.tensor(entry).shape;
  tensor.entry.meta.dtype = file.tensor(entry).dtype;
  tensor.entry.pieces.push_back({whole_box(tensor.entry.meta.shape), rank});
  tensor.pieces.push_back({&file, entry.index});
  add(std::move(tensor));
}

void EntryReader::add_of_each_rank(const std::vector<const File*>& files,
                                   const std::function<Place(const Entry&)>& target_of) {
  add_of_each_rank(files, [&](std::size_t, const Entry& entry) { return target_of(entry); });
}

void EntryReader::add_of_each_rank(
    const std::vector<const File*>& files,
    const std::function<Place(std::size_t, const Entry&)>& target_of) {
  std::map<std::string, Origin> first_of;                            // key: name
  std::map<std::pair<const File*, std::size_t>, std::string> names;  // of tensors
  Containers containers;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (files[i] == nullptr) continue;
    const int rank = static_cast<int>(i);
    std::vector<std::pair<const Entry*, Place>> added;
    Containers of_rank;
    for (const Entry& entry : files[i]->entries()) {
      Place place = target_of(i, entry);
      if (place.path.empty()) continue;
      add_containers(of_rank, place.path, place.num_joined);
      added.emplace_back(&entry, std::move(place));
    }
    const std::set<KeyPath> apart = merge_containers(containers, of_rank);
    for (auto& [entry, place] : added) {
      KeyPath path = std::move(place.path);
      if (const KeyPath* const container = prefix_of(path, apart)) {
        add_apart(path, *container, {files[i], entry, rank});
        continue;
      }
      std::string name = spell(path);
      const auto [first, is_new] = first_of.emplace(name, Origin{files[i], entry});
      const bool is_tensor = entry->kind == Entry::Kind::tensor;
      if (is_new && is_tensor && !names.emplace(std::pair(files[i], entry->index), name).second) {
        add_tie(std::move(path), names.at({files[i], entry->index}),
                order_in(*files[i], entry->dict_order));
      } else if (is_new) {
        add_entry(std::move(path), *files[i], *entry, rank);
      } else if (!are_equal(*first->second.file, *first->second.entry, *files[i], *entry)) {
        add_entry(per_rank_path(rank, name, path), *files[i], *entry, rank);
        differing_.insert(std::move(name));
      }
    }
  }
}

void EntryReader::add_of_ranks(const KeyPath& path, const std::vector<OfRank>& ranks) {
  const OfRank& first = ranks.front();
  add_entry(path, *first.file, *first.entry, first.rank);
  for (const auto& [file, entry, rank] : ranks) {
    if (are_equal(*first.file, *first.entry, *file, *entry)) continue;
    add_entry(per_rank_path(rank, spell(path), path), *file, *entry, rank);
    differing_.insert(spell(path));
  }
}

void EntryReader::add_apart(const KeyPath& path, const KeyPath& container, const OfRank& of_rank) {
  add_entry(per_rank_path(of_rank.rank, spell(path), path), *of_rank.file, *of_rank.entry,
            of_rank.rank);
  apart_.insert(spell(container));
}

void EntryReader::add_step(KeyPath path, const File& file, const Entry& entry, int rank,
                           std::optional<std::size_t> small_file) {
  const auto number = as_float(file.value_of(entry));
  if (!number && !small_file) {
    add_entry(std::move(path), file, entry, rank);
    return;
  }
  Tensor tensor = named(std::move(path));
  if (!small_file) tensor.entry.dict_order = order_in(file, entry.dict_order);
  tensor.entry.meta.dtype = DType::float32;
  if (!number) {
    if (entry.kind == Entry::Kind::value) {
      refuse(file, tensor.entry.meta.fqn, "step", "a number", "another kind of value");
    }
    tensor.entry.meta.shape = file.tensor(entry).shape;
    tensor.entry.meta.dtype = file.tensor(entry).dtype;
  }
  tensor.entry.pieces.push_back({whole_box(tensor.entry.meta.shape), rank});
  tensor.pieces.push_back(
      {small_file ? nullptr : &file, number ? 0 : entry.index, 0, number, small_file});
  add(std::move(tensor));
}

void EntryReader::add_value(KeyPath path, std::variant<Value, ValueSource> source,
                            std::uint32_t order) {
  order = place_of(path, order);
  std::string name = spell(path);
  path = without_name(std::move(path));
  auto read = [](auto&& each) -> AnyValueSource { return std::move(each); };
  values_.push_back({std::move(name), std::move(path), std::visit(read, std::move(source)), order});
}

void EntryReader::add_refused(KeyPath path, const Error& refusal) {
  const std::uint32_t order = place_of(path, 0);
  std::string name = spell(path);
  path = without_name(std::move(path));
  values_.push_back(
      {std::move(name), std::move(path), std::make_unique<const Error>(refusal), order});
}

void EntryReader::add_alias(const std::string& name, const std::string& target) {
  add_tie({std::string("model"), name}, spell({"model", target}), 0);
}

void EntryReader::add_tie(KeyPath path, const std::string& target, std::uint32_t order) {
  order = place_of(path, order);
  std::string name = spell(path);
  path = without_name(std::move(path));
  contents_.aliases.push_back({std::move(name), target, std::move(path), order});
}

void EntryReader::note(std::string rule, std::string expected, std::string found) {
  contents_.opening_findings.push_back(
      note_of(std::move(rule), std::move(expected), std::move(found)));
}

Finding EntryReader::note_of(std::string rule, std::string expected, std::string found) const {
  return {.severity = Finding::Severity::note,
          .rule = std::move(rule),
          .where = {.path = path_},
          .expected = std::move(expected),
          .found = std::move(found)};
}

std::vector<std::string> EntryReader::added_names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size() + values_.size() + contents_.aliases.size());
  for (const Tensor& tensor : tensors_) names.push_back(tensor.entry.meta.fqn);
  for (const NamedValue& value : values_) names.push_back(value.name);
  for (const Alias& alias : contents_.aliases) names.push_back(alias.fqn);
  return names;
}

void EntryReader::finish() {
  std::ranges::sort(tensors_, {},
                    [](const Tensor& t) { return std::string_view(t.entry.meta.fqn); });
  std::ranges::sort(values_, {}, &NamedValue::name);
  std::ranges::sort(contents_.aliases, {}, &Alias::fqn);
  take_entries();
  require_distinct_names(contents_, folder_, "save the entries beside the model under another key");
  if (!differing_.empty()) {
    contents_.opening_findings.push_back(per_rank_note(path_, differing_));
  }
  if (!apart_.empty()) {
    note("ranks", "dicts with the same keys, and lists of the same length, on all ranks",
         counted(apart_.size(), "name") + " with others, such as '" + printable(*apart_.begin()) +
             "' (that of the lowest rank keeps the name, each other one is a whole dict or list "
             "per_rank.<rank>.<name>)");
  }
  add_what_readers_found();
}

template <class Change>
void EntryReader::change_entries(const Change& change) {
  for (TensorEntry& tensor : contents_.tensors) change(tensor.meta.fqn, tensor);
  for (Alias& alias : contents_.aliases) change(alias.fqn, alias);
  for (ValueEntry& value : contents_.values) change(value.name, value);
}

void EntryReader::set_order(const std::vector<std::string>& names) {
  std::map<std::string_view, std::uint32_t> places;
  for (const std::string& name : names) {
    places.emplace(name, static_cast<std::uint32_t>(places.size() + 1));
  }
  const auto num_places = static_cast<std::uint32_t>(places.size());
  change_entries([&](const std::string& name, auto& entry) {
    const auto found = places.find(name);
    entry.dict_order = found == places.end() ? num_places + 1 + entry.dict_order : found->second;
  });
}

void EntryReader::set_key_paths(const std::vector<KeyPath>& paths) {
  std::map<std::string, const KeyPath*> path_of;
  for (const KeyPath& path : paths) path_of.emplace(spell(path), &path);
  change_entries([&](const std::string& name, auto& entry) {
    const auto found = path_of.find(name);
    if (found != path_of.end()) entry.key_path = *found->second;
  });
}

void EntryReader::drop_order() {
  change_entries([](const std::string&, auto& entry) { entry.dict_order = 0; });
}

/// Moves the entries into the contents.
void EntryReader::take_entries() {
  contents_.tensors.reserve(tensors_.size());
  sources_.reserve(tensors_.size());
  for (Tensor& tensor : tensors_) {
    contents_.tensors.push_back(std::move(tensor.entry));
    sources_.push_back(std::move(tensor.pieces));
  }
  tensors_.clear();
  tensors_.shrink_to_fit();
  contents_.values.reserve(values_.size());
  value_sources_.reserve(values_.size());
  for (NamedValue& value : values_) {
    contents_.values.push_back({std::move(value.name), std::move(value.path), value.order});
    value_sources_.push_back(std::move(value.source));
  }
  values_.clear();
  values_.shrink_to_fit();
}

/// Adds the opened classes (those in `as_dict`), without the framework's own records, which are
/// always read as dicts. Also adds simplifications.
void EntryReader::add_what_readers_found() {
  OpenedClassSum opened;
  for (const File& file : files_) {
    std::vector<OpenedClass> classes = file.reader().contents().opened_classes;
    std::erase_if(classes, [&](const OpenedClass& opened_class) {
      return std::ranges::find(family_.records, opened_class.name) != family_.records.end();
    });
    opened.add(classes);
  }
  contents_.opened_classes = opened.classes();
  add_simplifications();
}

/// Adds the simplifications that the files' readers report, with this checkpoint's names. Leaves
/// out those of a file's outermost dict and of `module`: this checkpoint has no such dicts.
void EntryReader::add_simplifications() {
  std::map<const File*, std::map<std::string, std::string>> names;  // name in the file -> name here
  for (const auto& [file, keys, name] : renamed_) names[file].emplace(spell(keys), name);
  std::map<std::pair<std::string, Simplification::Kind>, std::set<std::string>> simplified;
  for (const auto& [file, of_file] : names) {
    for (const auto& [kind, name, what] : file->reader().contents().simplifications) {
      if (name.empty() || name == "module") continue;
      for (auto next = of_file.lower_bound(name);
           next != of_file.end() && next->first.starts_with(name); ++next) {
        const std::string_view suffix = std::string_view(next->first).substr(name.size());
        if ((!suffix.empty() && suffix.front() != '.') || !next->second.ends_with(suffix)) continue;
        const std::string here = next->second.substr(0, next->second.size() - suffix.size());
        simplified[{here, kind}].insert(what.begin(), what.end());
      }
    }
  }
  for (const auto& [entry, what] : simplified) {
    contents_.simplifications.push_back({entry.second, entry.first, {what.begin(), what.end()}});
  }
  renamed_.clear();
}

}  // namespace tessera::formats::torch_files
