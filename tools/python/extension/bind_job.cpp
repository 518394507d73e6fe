#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bind_jobs.h"
#include "findings.h"
#include "formats/checkpoint_identity.h"
#include "formats/per_rank_rules.h"
#include "move_request.h"
#include "object_store/files.h"
#include "object_store/url.h"
#include "python_value.h"
#include "reshard/load_hints.h"
#include "reshard/load_renames.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"
#include "watched_work.h"

// Saving and loading the state of a running job. The other half is in src/tessera: _job_state.py
// and _job_tensors.py know torch's tensors, _ranks.py exchanges messages between ranks.

namespace tessera::python {
namespace {

using formats::CheckpointContents;
using formats::KeyPath;
using reshard::JobState;

// Types of Python's arguments. A key in a path is the key of a dict, or a
// `tessera._position.Position` in a list.
using PythonPath = std::vector<nb::object>;
using PythonBox = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;
using PythonShard =
    std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<int>>;
using PythonTensor =
    std::tuple<PythonPath, std::string, std::vector<std::int64_t>, std::vector<PythonShard>>;
using PythonValue = std::pair<PythonPath, nb::object>;
using Renames = std::vector<std::pair<nb::bytes, nb::bytes>>;  // each: from, to
/// By name of a tensor: the boxes that this rank holds. A tied tensor is there under each of its
/// names.
using HeldBoxes = std::map<std::string, std::vector<PythonBox>>;
/// By name of a tensor: for each box in HeldBoxes, the address of its first element; 0: none.
using Addresses = std::map<std::string, std::vector<std::uintptr_t>>;

KeyPath key_path_of(const PythonPath& path) {
  KeyPath keys;
  for (const nb::object& key : path) {
    if (nb::isinstance(key, position_type())) {
      keys.emplace_back(nb::cast<std::int64_t>(key));
      continue;
    }
    const Value value = value_from_python(key, "a key of the state dict");
    const std::optional<formats::Key> of_dict = formats::dict_key(value);
    if (!of_dict) {
      throw Error::expected(ErrorKind::unsupported, {}, "key of a dict", "a str or a number",
                            value_to_string(value));
    }
    keys.push_back(*of_dict);
  }
  return keys;
}

DType dtype_of(const std::string& name, const std::string& fqn) {
  const auto dtype = parse_dtype(name);
  if (!dtype) {
    throw Error::expected(ErrorKind::unsupported, {.fqn = fqn}, "dtype",
                          "a dtype that Tessera supports", name);
  }
  return *dtype;
}

/// Returns the path as checkpoints store it: empty for a single string key, which equals the name.
KeyPath stored_path(KeyPath path) {
  if (path.size() == 1 && std::holds_alternative<std::string>(path.front())) return {};
  return path;
}

std::vector<Rename> rules_of(const Renames& renames) {
  std::vector<Rename> rules;
  for (const auto& [from, to] : renames) rules.push_back({string_of(from), string_of(to)});
  return rules;
}

/// The tensors of a job with their layout over the ranks, equal on all ranks.
class Job {
 public:
  Job(int world_size, const std::vector<PythonTensor>& tensors,
      const std::vector<std::pair<PythonPath, std::string>>& aliases,
      const std::vector<nb::bytes>& value_names) {
    state_.world_size = world_size;
    state_.has_kinds_by_name = true;
    state_.value_names = strings_of(value_names);
    for (const auto& [path, dtype, shape, layout] : tensors) {
      reshard::JobTensor& tensor = state_.tensors.emplace_back();
      tensor.key_path = key_path_of(path);
      const std::string fqn = formats::spell(tensor.key_path);
      tensor.key_path = stored_path(std::move(tensor.key_path));
      tensor.meta = {fqn, dtype_of(dtype, fqn), shape};
      for (const auto& [offsets, sizes, ranks] : layout) {
        tensor.layout.push_back({Box{offsets, sizes}, ranks});
      }
    }
    for (const auto& [path, target] : aliases) {
      KeyPath keys = key_path_of(path);
      std::string fqn = formats::spell(keys);
      state_.aliases.push_back({std::move(fqn), target, stored_path(std::move(keys))});
    }
  }

  const JobState& state() const { return state_; }
  std::string digest(const std::string& format) const {
    return reshard::layout_digest(state_, reshard::format_of_parts(format_to_write(format, {})));
  }

 private:
  JobState state_;
};

std::vector<std::vector<Region>> regions_of(const CheckpointContents& contents,
                                            const HeldBoxes& held) {
  std::vector<std::vector<Region>> regions;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    std::vector<Region>& of_tensor = regions.emplace_back();
    const auto found = held.find(tensor.meta.fqn);
    if (found == held.end()) continue;
    for (const auto& [offsets, sizes] : found->second) of_tensor.push_back(Box{offsets, sizes});
  }
  return regions;
}

/// Returns the addresses of each tensor's boxes; none for a tensor that `addresses` does not have.
template <class Byte>
std::vector<std::vector<Byte*>> data_of(const CheckpointContents& contents,
                                        const Addresses& addresses) {
  std::vector<std::vector<Byte*>> data;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    std::vector<Byte*>& of_tensor = data.emplace_back();
    const auto found = addresses.find(tensor.meta.fqn);
    if (found == addresses.end()) continue;
    TESSERA_CHECK(found->second.size() == tensor.pieces.size());
    for (const std::uintptr_t address : found->second) {
      of_tensor.push_back(reinterpret_cast<Byte*>(address));
    }
  }
  return data;
}

/// The boxes in a rank's memory. A box whose address is 0 is on a device, and the Python function
/// `read` copies its bytes to the host; or this rank does not write it, and nothing reads it.
class JobMemory final : public formats::TensorSource {
 public:
  /// `read(name, box, begin, end, address)` copies bytes [begin, end) of the box with index `box`
  /// to `address`. `read` and `contents` must outlive this object. Needs no GIL from the caller.
  JobMemory(const CheckpointContents& contents, const Addresses& addresses,
            const nb::callable& read)
      : contents_(contents),
        data_(data_of<const std::byte>(contents, addresses)),
        at_addresses_(reshard::memory_source(contents, data_)),
        read_(read) {}

  const CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t tensor, std::size_t piece, FlatRange range,
                  std::span<std::byte> out) const override {
    if (data_[tensor][piece] != nullptr || out.empty()) {
      return at_addresses_->read_piece(tensor, piece, range, out);
    }
    const auto& meta = contents_.tensors[tensor].meta;
    const auto begin = static_cast<std::uint64_t>(range.begin) * itemsize(meta.dtype);
    const nb::gil_scoped_acquire gil;
    try {
      read_(text_to_python(meta.fqn), piece, begin, begin + out.size(),
            reinterpret_cast<std::uintptr_t>(out.data()));
    } catch (const nb::python_error& error) {
      throw Error(ErrorKind::io, {.fqn = meta.fqn},
                  std::string("copy from the device: ") + error.what());
    }
  }

 private:
  const CheckpointContents& contents_;
  std::vector<std::vector<const std::byte*>> data_;
  std::unique_ptr<formats::TensorSource> at_addresses_;
  const nb::callable& read_;
};

/// Decides which pieces of a job's tensors this rank writes. Can be used for any number of saves of
/// the same layout.
class SavePlan {
 public:
  SavePlan(const Job& job, const std::string& format, int rank, const HeldBoxes& held) {
    const formats::Format of_parts = reshard::format_of_parts(format_to_write(format, {}));
    contents_ = reshard::share_out(job.state(), formats::traits_of(of_parts));
    const auto regions = regions_of(contents_, held);
    plan_ = reshard::plan_save(contents_, regions, rank);
    held_contents_ = reshard::held_contents(contents_, regions, rank);
    num_aliases_ = job.state().aliases.size();
  }

  std::uint64_t nbytes() const { return plan_.nbytes_to_write; }

  /// Returns, by name of a tensor, the indices of the boxes from which this rank writes elements.
  std::map<std::string, std::vector<std::uint32_t>> boxes_read() const {
    std::map<std::string, std::vector<std::uint32_t>> read;
    for (std::size_t t = 0; t < plan_.copies.size(); ++t) {
      const std::string& name = contents_.tensors[t].meta.fqn;
      for (const auto& sources : plan_.copies[t].source_pieces) {
        for (const std::uint32_t box : sources) {
          auto& boxes = read[name];
          if (std::ranges::find(boxes, box) == boxes.end()) boxes.push_back(box);
        }
      }
    }
    return read;
  }

  const CheckpointContents& contents() const { return contents_; }
  std::size_t num_aliases() const { return num_aliases_; }  // of the job
  const reshard::Plan& plan() const { return plan_; }
  JobMemory memory(const Addresses& addresses, const nb::callable& read) const {
    return {held_contents_, addresses, read};
  }

 private:
  CheckpointContents contents_;       // the pieces of the checkpoint
  CheckpointContents held_contents_;  // the boxes in this rank's memory
  std::size_t num_aliases_ = 0;
  reshard::Plan plan_;
};

/// This rank's side of one save (RankSave).
class Save {
 public:
  Save(const nb::bytes& path, const std::string& format, int rank, bool overwrite, int keep_last,
       const std::string& compress, std::uint64_t memory, const nb::bytes& base, bool changed_rows)
      : save_(std::in_place, string_of(path), rank,
              reshard::RankSaveOptions{
                  .format = format_to_write(format, {}),
                  .overwrite = overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse,
                  .native = compression_to_write(compress, format_to_write(format, {})),
                  .keep_last = keep_last,
                  .base = string_of(base),
                  .changed_rows = changed_rows,
                  .memory_nbytes = memory}) {}

  /// Returns whether rank 0 makes the file of this format from the parts of all ranks.
  bool is_one_file() const {
    const formats::Format format = save_->options().format;
    return reshard::format_of_parts(format) != format;
  }

  nb::bytes stage() {
    std::string directory;
    {
      const nb::gil_scoped_release without_gil;
      const reshard::RankSaveOptions& options = save_->options();
      const bool is_on_store = object_store::is_on_store(save_->path());
      const FileSystem& fs = is_on_store ? object_store::files() : *options.file_system;
      object_store::forget(save_->path());
      if (options.overwrite == OverwritePolicy::replace) {
        formats::check_replaceable(fs, save_->path(), "overwrite=True");
      } else if (!is_on_store && fs.kind_of(save_->path())) {
        throw Error(ErrorKind::already_exists, {.path = save_->path()},
                    "the destination exists (overwrite=True replaces it)");
      }
      if (!is_on_store && options.keep_last > 0) {
        lock_ = std::make_unique<formats::DirectoryLock>(directory_of(save_->path()));
      }
      directory = save_->stage();
    }
    return nb::bytes(directory.data(), directory.size());
  }

  void set_contents(const SavePlan& plan, const nb::bytes& directory,
                    const std::vector<PythonValue>& values) {
    CheckpointContents contents = plan.contents();
    std::map<std::string, std::pair<KeyPath, Value>> by_name;
    for (const auto& [path, object] : values) {
      KeyPath keys = key_path_of(path);
      std::string name = formats::spell(keys);
      Value value = value_from_python(object, name);
      by_name.insert_or_assign(std::move(name),
                               std::pair(stored_path(std::move(keys)), std::move(value)));
    }
    std::vector<Value> stored;
    for (auto& [name, entry] : by_name) {
      contents.values.push_back({name, std::move(entry.first)});
      stored.push_back(std::move(entry.second));
    }
    const std::string where = string_of(directory);
    for (const auto& counted :
         reshard::count_save_changes(contents, plan.num_aliases(), save_->options().format)) {
      changes_.emplace(format_change_name(counted.change), counted.count);
    }
    const nb::gil_scoped_release without_gil;
    save_->set_contents(where, std::move(contents), std::move(stored));
  }

  /// Removes the files that were written, and releases the lock. The object cannot be used
  /// afterwards.
  void abandon() {
    const nb::gil_scoped_release without_gil;
    save_.reset();
    lock_.reset();
  }

  void start_one_file() {
    const nb::gil_scoped_release without_gil;
    save_->start_one_file();
  }
  std::string compare_with_base(const SavePlan& plan, const Addresses& addresses,
                                const nb::callable& read) {
    const nb::gil_scoped_release without_gil;
    return save_->compare_with_base(plan.plan(), plan.memory(addresses, read));
  }
  void link_equal_pieces(const std::vector<std::string>& texts) {
    const nb::gil_scoped_release without_gil;
    save_->link_equal_pieces(texts);
  }
  std::uint64_t linked_nbytes() const { return save_->linked_nbytes(); }
  /// Returns how often the format makes each kind of change.
  const std::map<std::string, std::size_t>& changes() const { return changes_; }
  nb::list left_checkpoints() const {
    nb::list lines;
    for (const std::string& line : save_->left_checkpoints()) lines.append(text_to_python(line));
    return lines;
  }
  void write(const SavePlan& plan, const Addresses& addresses, const nb::callable& read) {
    const nb::gil_scoped_release without_gil;
    save_->write(plan.plan(), plan.memory(addresses, read));
  }
  std::uint64_t join() {
    const nb::gil_scoped_release without_gil;
    return save_->join();
  }
  void seal(std::uint64_t token) {
    const nb::gil_scoped_release without_gil;
    save_->seal(token);
  }
  void finish() {
    const nb::gil_scoped_release without_gil;
    save_->finish();
    lock_.reset();
  }

 private:
  std::optional<reshard::RankSave> save_;  // empty after `abandon`
  std::map<std::string, std::size_t> changes_;
  std::unique_ptr<formats::DirectoryLock> lock_;  // on rank 0, for keep_last
};

/// Returns the items of a list that become entries of their own, as in JobState (_job_state.py):
/// all of them if one is a dict, or a list whose items do. Returns nullptr for any other value.
const Value::List* split_items(const Value& value) {
  const auto* const items = value.get_if<Value::List>();
  if (items == nullptr) return nullptr;
  const auto splits = [](const Value& item) {
    return item.is<Value::Dict>() || split_items(item) != nullptr;
  };
  return std::ranges::any_of(*items, splits) ? items : nullptr;
}

/// Calls `add` for each entry that a state dict has in place of the value at `path`: for the items
/// of its dicts and lists.
void split_value(KeyPath& path, const Value& value,
                 const std::function<void(const KeyPath&, const Value&)>& add) {
  const auto below = [&](formats::Key key, const Value& item) {
    path.push_back(std::move(key));
    split_value(path, item, add);
    path.pop_back();
  };
  const auto* const dict = value.get_if<Value::Dict>();
  const auto has_key = [](const auto& item) { return formats::dict_key(item.first).has_value(); };
  if (dict != nullptr && !dict->empty() && std::ranges::all_of(*dict, has_key)) {
    for (const auto& [key, item] : *dict) below(*formats::dict_key(key), item);
  } else if (const Value::List* const items = split_items(value)) {
    for (std::size_t i = 0; i < items->size(); ++i)
      below(static_cast<std::int64_t>(i), (*items)[i]);
  } else {
    add(path, value);
  }
}

/// An open checkpoint, and the plan by which this rank loads from it.
class Load {
 public:
  Load(const nb::bytes& path, const nb::bytes& flat_layout, const Renames& renames) {
    const std::string opened = string_of(path);
    run_interruptibly([&] {
      object_store::forget(opened);
      reader_ = formats::open_checkpoint(files_.file_system(), opened,
                                         {.flat_layout_path = string_of(flat_layout)});
    });
    renames_ = options_.renames = rules_of(renames);
  }

  std::string_view format() const { return reader_->format().name(); }
  int world_size() const { return reader_->contents().world_size; }
  std::uint64_t nbytes() const { return plan_.nbytes_to_write; }

  /// Takes the names of the job's entries. Adds the renames that the given ones imply. Takes each
  /// value apart of which the job has only items: `args` if the names contain `args.lr`, but not
  /// `args`.
  void set_names(const std::vector<nb::bytes>& names_of_job) {
    split_.reset();
    const std::vector<std::string> listed = strings_of(names_of_job);
    const std::set<std::string> names(listed.begin(), listed.end());
    names_of_job_ = listed;
    if (!renames_.empty()) {
      models_of_source_ = reshard::model_prefixes(reader_->contents());
      models_of_job_ = reshard::model_prefixes(listed);
    }
    options_.renames =
        reshard::with_optimizer_renames(renames_, reader_->contents(), models_of_job_);
    Split split;
    bool is_split = false;
    const std::vector<formats::ValueEntry>& values = reader_->contents().values;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::string name = renamed_name(values[i].name);
      const auto item = names.lower_bound(name + ".");
      const bool has_items = item != names.end() && item->starts_with(name + ".");
      std::optional<Value> value;
      if (has_items && !names.contains(name)) value = value_to_split(i);
      if (!value) {
        split.entries.push_back({values[i], i});
        continue;
      }
      is_split = true;
      KeyPath path(values[i].key_path.begin(), values[i].key_path.end());
      if (path.empty()) path.emplace_back(values[i].name);
      split_value(path, *value, [&](const KeyPath& keys, const Value& part) {
        split.entries.push_back({{formats::spell(keys), stored_path(keys)}, part});
      });
    }
    if (!is_split) return;
    std::ranges::stable_sort(split.entries, {},
                             [](const SplitEntry& each) { return each.entry.name; });
    split.contents = reader_->contents();
    split.contents.values.clear();
    for (const SplitEntry& each : split.entries) split.contents.values.push_back(each.entry);
    split_ = std::move(split);
  }

  /// Returns `(name, path)` of each value: its name after the renames, and its path before. Paths
  /// have the form that Python uses.
  nb::list values() const {
    nb::list list;
    for (const formats::ValueEntry& value : contents().values) {
      list.append(nb::make_tuple(text_to_python(renamed_name(value.name)),
                                 path_to_python(value.key_path, value.name)));
    }
    return list;
  }
  nb::object read_value(std::size_t value_index) const {
    return value_to_python(reshard::with_renamed_members(
        contents().values[value_index].name, value_at(value_index), options_.renames,
        reader_->contents(), models_of_source_, models_of_job_));
  }

  /// Returns a digest by which ranks check that they load the same checkpoint, or copies of it.
  std::string identity(const std::vector<nb::bytes>& only) const {
    const formats::EntrySelection selection(NameSelection(strings_of(only)));
    std::string identity;
    run_short_read(reader_->path(), [&] {
      identity = formats::identity_of(
          *reader_, [&](const std::string& fqn) { return selection.selects(renamed_name(fqn)); });
    });
    return identity;
  }

  /// Plans the load of a job's tensors and of the values `value_names`. Returns problems and notes.
  nb::list plan(const Job& job, int rank, const HeldBoxes& held,
                const std::vector<nb::bytes>& value_names, bool allow_missing,
                bool allow_unexpected, bool allow_cast, const std::vector<nb::bytes>& only) {
    std::vector<std::string> names = strings_of(value_names);
    std::ranges::sort(names);
    const auto allow = [](bool allowed) {
      return allowed ? reshard::Relaxation::allow : reshard::Relaxation::refuse;
    };
    options_.missing = allow(allow_missing);
    options_.unexpected = allow(allow_unexpected);
    options_.cast = allow(allow_cast);
    options_.only = NameSelection(strings_of(only));
    {
      const nb::gil_scoped_release without_gil;
      // Looks at all files at once, so that read() notices those that another save replaces before
      // they are opened. One rank does, because there may be as many files as ranks.
      if (rank == 0) files_.states_of(*reader_);
      const CheckpointContents of_job = reshard::share_out(job.state(), {});
      wanted_ = reshard::held_contents(of_job, regions_of(of_job, held), rank);
      for (std::string& name : names) wanted_.values.push_back({std::move(name), {}});
      rank_ = rank;
      plan_ = reshard::plan_load(contents(), reader_->path(), wanted_, rank, options_);
      for (formats::Finding& problem : plan_.problems) problem.where.path.clear();
    }
    nb::list found = findings_to_python(plan_.problems, python_remedy_of_load);
    found.extend(findings_to_python(plan_.notes, python_remedy_of_load));
    return found;
  }

  /// Returns what the user can do about the problems of `plan`, followed by `others`: problems that
  /// Python has found, each as its rule and name. `held`: the first components of the job's names.
  nb::dict hints(const std::vector<std::pair<std::string, nb::bytes>>& others,
                 const std::vector<nb::bytes>& held) const {
    std::vector<formats::Finding> problems = plan_.problems;
    for (const auto& [rule, name] : others) {
      problems.push_back(
          {formats::Finding::Severity::error, rule, {.fqn = string_of(name)}, {}, {}});
    }
    const std::vector<std::string> first_components = strings_of(held);
    const reshard::ModelPrefixes models_of_job = reshard::model_prefixes(names_of_job_);
    const reshard::LoadHints found =
        reshard::hints_for_load({problems, contents(), reader_->path(), wanted_, rank_, options_,
                                 models_of_job, first_components});
    nb::list renames;
    nb::list lines;
    for (const reshard::RenamedNames& each : found.renames) {
      lines.append(text_to_python(reshard::line_of(each, "the state dict")));
      renames.append(
          nb::make_tuple(text_to_python(each.rename.from), text_to_python(each.rename.to)));
    }
    nb::list is_renamed;
    for (const bool each : found.is_renamed) is_renamed.append(each);
    nb::dict hints;
    hints["renames"] = renames;
    hints["lines"] = lines;
    hints["is_renamed"] = is_renamed;
    hints["after_renames"] = findings_to_python(found.after_renames, python_remedy_of_load);
    nb::list numbered;
    for (const std::string& each : found.numbered) numbered.append(text_to_python(each));
    hints["numbered"] = numbered;
    hints["has_more"] = found.has_more;
    hints["may_cast"] = found.may_cast;
    hints["nearest"] = nb::none();
    if (found.nearest) {
      hints["nearest"] = nb::make_tuple(text_to_python(found.nearest->first),
                                        text_to_python(found.nearest->second));
    }
    return hints;
  }

  /// Returns the names of the tensors that are loaded.
  nb::list loaded() const {
    nb::list names;
    for (const auto& tensor : plan_.destination.tensors) {
      names.append(text_to_python(tensor.meta.fqn));
    }
    return names;
  }

  /// Reads the tensors. Returns, by name, how many elements a cast made zero on this rank.
  nb::dict read(const Addresses& addresses, std::uint64_t memory, int num_threads,
                nb::handle progress) const {
    std::vector<reshard::TensorUnderflow> underflows;
    const auto writer =
        reshard::memory_writer(plan_.destination, data_of<std::byte>(plan_.destination, addresses));
    run_watched(progress, [&](Watch& watch) {
      watch.expect(plan_.nbytes_to_write);
      reshard::execute(plan_, *reader_, *writer,
                       {.memory_nbytes = memory,
                        .num_threads = num_threads,
                        .stop = watch.token(),
                        .progress = watch.sink(),
                        .underflowed = [&](const auto& each) { underflows.push_back(each); }});
      files_.require_unchanged();
    });
    nb::dict by_name;
    for (const auto& [tensor_index, num_elements] : underflows) {
      by_name[text_to_python(plan_.destination.tensors[tensor_index].meta.fqn)] = num_elements;
    }
    return by_name;
  }

 private:
  /// A value of the checkpoint, or an entry that was made from a part of one.
  struct SplitEntry {
    formats::ValueEntry entry;
    std::variant<std::size_t, Value> value;  // a number: the value of that index in the checkpoint
  };
  struct Split {
    std::vector<SplitEntry> entries;
    CheckpointContents contents;  // of the checkpoint, but with the values of `entries`
  };

  const CheckpointContents& contents() const {
    return split_ ? split_->contents : reader_->contents();
  }
  std::string renamed_name(const std::string& name) const {
    return formats::name_after_renames(name, options_.renames);
  }
  Value stored_value(std::size_t index) const {
    Value value;
    run_short_read(reader_->path(), [&] { value = reader_->read_value(index); });
    return value;
  }
  Value value_at(std::size_t index) const {
    if (!split_) return stored_value(index);
    const auto& value = split_->entries[index].value;
    if (const auto* const stored = std::get_if<std::size_t>(&value)) return stored_value(*stored);
    return std::get<Value>(value);
  }
  /// Returns nothing for a value that Tessera never reads, such as an object of a class.
  std::optional<Value> value_to_split(std::size_t index) const {
    try {
      return stored_value(index);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      return std::nullopt;
    }
  }

  reshard::SourceFiles files_;
  std::unique_ptr<formats::CheckpointReader> reader_;
  std::optional<Split> split_;  // empty if no value is taken apart
  CheckpointContents wanted_;   // with the pieces that this rank holds
  int rank_ = 0;
  std::vector<Rename> renames_;       // as given
  reshard::LoadPlanOptions options_;  // its renames have those of optimizer state that they imply
  std::vector<std::string> names_of_job_;
  reshard::ModelPrefixes models_of_source_;  // of both, found only if names are changed
  reshard::ModelPrefixes models_of_job_;
  reshard::Plan plan_;
};

}  // namespace

void bind_job(nb::module_& module) {
  nb::class_<Job>(module, "Job")
      .def(nb::init<int, const std::vector<PythonTensor>&,
                    const std::vector<std::pair<PythonPath, std::string>>&,
                    const std::vector<nb::bytes>&>(),
           nb::arg("world_size"), nb::arg("tensors"), nb::arg("aliases"), nb::arg("value_names"))
      .def("digest", &Job::digest, nb::arg("format"));
  nb::class_<SavePlan>(module, "SavePlan")
      .def(nb::init<const Job&, const std::string&, int, const HeldBoxes&>(), nb::arg("job"),
           nb::arg("format"), nb::arg("rank"), nb::arg("held"))
      .def_prop_ro("nbytes", &SavePlan::nbytes)
      .def("boxes_read", &SavePlan::boxes_read);
  nb::class_<Save>(module, "Save")
      .def(nb::init<const nb::bytes&, const std::string&, int, bool, int, const std::string&,
                    std::uint64_t, const nb::bytes&, bool>(),
           nb::arg("path"), nb::arg("format"), nb::arg("rank"), nb::arg("overwrite"),
           nb::arg("keep_last"), nb::arg("compress"), nb::arg("memory"), nb::arg("base"),
           nb::arg("changed_rows"))
      .def_prop_ro("is_one_file", &Save::is_one_file)
      .def("stage", &Save::stage)
      .def("set_contents", &Save::set_contents, nb::arg("plan"), nb::arg("directory"),
           nb::arg("values"))
      .def("start_one_file", &Save::start_one_file)
      .def("compare_with_base", &Save::compare_with_base, nb::arg("plan"), nb::arg("addresses"),
           nb::arg("read"))
      .def("link_equal_pieces", &Save::link_equal_pieces, nb::arg("texts"))
      .def_prop_ro("linked_nbytes", &Save::linked_nbytes)
      .def_prop_ro("changes", &Save::changes)
      .def_prop_ro("left_checkpoints", &Save::left_checkpoints)
      .def("write", &Save::write, nb::arg("plan"), nb::arg("addresses"), nb::arg("read"))
      .def("join", &Save::join)
      .def("seal", &Save::seal, nb::arg("token"))
      .def("finish", &Save::finish)
      .def("abandon", &Save::abandon);
  nb::class_<Load>(module, "Load")
      .def(nb::init<const nb::bytes&, const nb::bytes&, const Renames&>(), nb::arg("path"),
           nb::arg("flat_layout"), nb::arg("rename"))
      .def_prop_ro("format", &Load::format)
      .def_prop_ro("world_size", &Load::world_size)
      .def_prop_ro("nbytes", &Load::nbytes)
      .def("set_names", &Load::set_names, nb::arg("names_of_job"))
      .def("values", &Load::values)
      .def("read_value", &Load::read_value, nb::arg("value_index"))
      .def("identity", &Load::identity, nb::arg("only"))
      .def("plan", &Load::plan, nb::arg("job"), nb::arg("rank"), nb::arg("held"),
           nb::arg("value_names"), nb::arg("allow_missing"), nb::arg("allow_unexpected"),
           nb::arg("allow_cast"), nb::arg("only"))
      .def("hints", &Load::hints, nb::arg("others"), nb::arg("held"))
      .def("loaded", &Load::loaded)
      .def("read", &Load::read, nb::arg("addresses"), nb::arg("memory"), nb::arg("threads"),
           nb::arg("progress").none());
  nb::class_<NameSelection>(module, "Selection")
      .def(
          "__init__",
          [](NameSelection* self, const std::vector<nb::bytes>& patterns) {
            new (self) NameSelection(strings_of(patterns));
          },
          nb::arg("patterns"))
      .def(
          "selects",
          [](const NameSelection& self, const nb::bytes& name) {
            return self.selects(string_of(name));
          },
          nb::arg("name"));
  module.def("set_held_interrupt", &set_held_interrupt, nb::arg("is_held"));
  module.def(
      "set_bucket_endpoint",
      [](const nb::bytes& path, const nb::bytes& endpoint) {
        object_store::set_bucket_endpoint(string_of(path), string_of(endpoint));
      },
      nb::arg("path"), nb::arg("endpoint"));
  module.def(
      "keep_query",
      [](const nb::bytes& path) {
        object_store::is_url(string_of(path));  // refuses what is neither a path nor a URL
        const std::string kept = object_store::keep_query(string_of(path));
        return nb::bytes(kept.data(), kept.size());
      },
      nb::arg("path"));
  module.def(
      "latest_valid",
      [](const nb::bytes& directory, bool checksums) {
        const std::string path = string_of(directory);
        formats::LatestValid found;
        run_interruptibly([&] {
          found = formats::latest_valid(
              path, checksums ? formats::Validation::checksums : formats::Validation::structure);
        });
        nb::list skipped;
        for (const formats::SkippedCheckpoint& each : found.skipped) {
          skipped.append(nb::make_tuple(path_or_none(each.path), text_to_python(each.why)));
        }
        return nb::make_tuple(path_or_none(found.path), skipped);
      },
      nb::arg("directory"), nb::arg("checksums"));
  module.def(
      "spell_path",
      [](const PythonPath& path) { return text_to_python(formats::spell(key_path_of(path))); },
      nb::arg("path"));
  module.def(
      "plain_value",
      [](const PythonPath& path, const nb::object& value) {
        return value_to_python(value_from_python(value, formats::spell(key_path_of(path))));
      },
      nb::arg("path"), nb::arg("value").none());
}

}  // namespace tessera::python
