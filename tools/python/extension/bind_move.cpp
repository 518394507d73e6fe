#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind_jobs.h"
#include "findings.h"
#include "formats/source_overlap.h"
#include "move_request.h"
#include "object_store/files.h"
#include "python_value.h"
#include "reshard/value_changes.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"
#include "tessera/reshard/store_destination.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

using formats::CheckpointReader;
using formats::Format;
using formats::MergePath;
using reshard::ExecuteOptions;
using reshard::Plan;
using BytesPairs = std::vector<std::pair<nb::bytes, nb::bytes>>;

/// The result of a move.
struct Outcome {
  Plan plan;
  reshard::ExtraFilesPlan extra_files;
  Format source_format{};
  std::uint64_t kept_nbytes = 0;
  std::uint64_t linked_nbytes = 0;                   // bytes in files that are shared with the base
  std::optional<reshard::SharedMoveOutcome> shared;  // if several workers do the move
  std::vector<reshard::TensorOverflow> overflows;
  std::vector<reshard::TensorUnderflow> underflows;
  reshard::FileStates source_files;  // states of the source's files when they were opened
  std::string plan_digest;
  std::optional<std::string> left_over;  // an old checkpoint that could not be removed
  std::vector<std::string> warnings;
};

formats::MergedCheckpoint open_as_stored(const Sources& sources, const FileSystem& fs) {
  const MergePath& first = sources.paths.front();
  if (sources.paths.size() > 1 || !first.prefix.empty()) {
    return formats::open_merged(fs, sources.paths, sources.preference, sources.as_dict);
  }
  return {formats::open_checkpoint(
              fs, first.path,
              {.flat_layout_path = sources.flat_layout_path, .as_dict = sources.as_dict}),
          {},
          0};
}

/// Opens the source. As the options say, gives names to an optimizer's numbered parameters, and
/// applies a recipe. If several sources of a merge have the same name, does neither: the plan then
/// reports the name.
formats::MergedCheckpoint open(const MoveRequest& request, const FileSystem& fs) {
  const Sources& sources = request.sources;
  formats::MergedCheckpoint source = open_as_stored(sources, fs);
  formats::require_classes_found(sources.as_dict, {&source.reader->contents()}, "as_dict");
  if (source.collisions.empty()) {
    source.reader = reshard::apply_params_and_recipe(
        std::move(source.reader), sources.optimizer_params ? &*sources.optimizer_params : nullptr,
        request.plan.only, [&](std::unique_ptr<CheckpointReader> reader) {
          if (!sources.recipe) return reader;
          return recipe::open_transformed(std::move(reader), sources.recipe->recipe,
                                          sources.recipe->options);
        });
  }
  sources.prefixes.check_used(source.reader->contents(), "prefix");
  return source;
}

/// The file system and the path at which a writer makes the checkpoint.
struct Place {
  FileSystem& fs;
  std::string path;
};

/// Moves all bytes and commits, or writes a worker's share. Returns how many bytes it resumed.
std::uint64_t execute(const MoveRequest& request, const CheckpointReader& reader, Outcome& outcome,
                      const Place& place, const formats::CreateOptions& create, Watch& watch) {
  FileSystem& fs = place.fs;
  const Plan& plan = outcome.plan;
  watch.expect(reshard::nbytes_to_move(plan, create));
  ExecuteOptions options = request.execute;
  options.stop = watch.token();
  options.progress = watch.sink();
  options.source_files = outcome.source_files;
  options.overflowed = [&](const auto& overflow) { outcome.overflows.push_back(overflow); };
  options.underflowed = [&](const auto& each) { outcome.underflows.push_back(each); };
  if (request.worker) {
    reshard::SharedMoveOptions worker = *request.worker;
    worker.begins = [&](int, std::uint64_t nbytes) { watch.expect(nbytes); };
    worker.warns = [&](const std::string& warning) { outcome.warnings.push_back(warning); };
    outcome.shared = reshard::move_share(plan, reader, fs, place.path, create, worker, options);
    std::uint64_t resumed_nbytes = 0;
    for (const auto& share : outcome.shared->shares) resumed_nbytes += share.resumed_nbytes;
    return resumed_nbytes;
  }
  const auto writer =
      reshard::start_move(plan, reader, fs, place.path, create, outcome.source_files);
  return reshard::finish_or_keep(plan, reader, *writer, fs, place.path, options);
}

/// As `execute`, but to an object store. A dry run only checks whether the move could start.
void execute_to_store(const MoveRequest& request, const CheckpointReader& reader, Outcome& outcome,
                      formats::CreateOptions create, Watch& watch) {
  const auto kept_work = create.journal ? create.journal->kept_work : formats::KeptWork::refuse;
  reshard::StoreDestination store(
      request.destination, {.format = create.format,
                            .overwrite = create.overwrite,
                            .kept_work = request.dry_run && kept_work == formats::KeptWork::discard
                                             ? formats::KeptWork::resume
                                             : kept_work,
                            .overwrite_option = "overwrite=True",
                            .extra_files = create.extra_files,
                            .spool = request.spool});
  // The local folder (the spool) is new for each move. What is to be resumed or replaced is on the
  // server.
  create.overwrite = OverwritePolicy::refuse;
  create.journal.reset();
  store.run([&] {
    const Place place{store.file_system(), store.path()};
    if (request.dry_run) {
      reshard::check_move(outcome.plan, reader, place.fs, place.path, create, std::nullopt,
                          outcome.source_files);
    } else {
      execute(request, reader, outcome, place, create, watch);
    }
  });
}

/// Throws if the destination must not be written or replaced. A directory that is replaced may
/// contain files with the names of `extra_files`. If `extra_files` is null (not known yet), an
/// existing directory is not checked.
void check_destination(const MoveRequest& request,
                       const std::vector<formats::ExtraFile>* extra_files) {
  const FileSystem& fs = object_store::files();
  const OverwritePolicy overwrite = request.create.overwrite;
  // StoreDestination checks what is on the object store: an interrupted move may have left it.
  const bool takes_kept_work =
      request.create.journal && request.create.journal->kept_work != formats::KeptWork::refuse;
  const bool is_checked_later = takes_kept_work || overwrite == OverwritePolicy::replace;
  if (is_checked_later && object_store::is_on_store(request.destination)) {
    for (const MergePath& source : request.sources.paths) {
      formats::require_apart(fs, source.path, request.destination);
    }
    return;
  }
  const bool may_hold_extra_files = fs.kind_of(request.destination) == FileKind::directory;
  if (extra_files == nullptr && may_hold_extra_files) return;
  for (const MergePath& source : request.sources.paths) {
    formats::check_destination(fs, source.path, request.destination, overwrite, "overwrite=True",
                               extra_files ? *extra_files : std::vector<formats::ExtraFile>());
  }
}

/// Plans a move with its extra files.
Outcome plan(const MoveRequest& request, const formats::MergedCheckpoint& source) {
  const CheckpointReader& reader = *source.reader;
  Outcome outcome;
  reshard::PlanOptions wanted = request.plan;
  wanted.num_unordered_dicts = source.num_unordered_dicts;
  std::vector<std::string> paths;
  for (const MergePath& path : request.sources.paths) paths.push_back(path.path);
  std::vector<std::string> with_config = paths;
  if (!request.extra_files.folder.empty()) with_config.push_back(request.extra_files.folder);
  for (const std::string& path : with_config) {
    if (!wanted.cast || !wanted.quantization_method.empty()) break;
    wanted.quantization_method = formats::read_quantization_method(object_store::files(), path);
  }
  outcome.plan = reshard::plan_reshard(reader.contents(), reader.path(), wanted,
                                       reshard::find_gaps(reader, request.plan.only));
  reshard::ExtraFilesOptions extra_files = request.extra_files;
  const bool has_prefix = std::ranges::any_of(
      request.sources.paths, [](const auto& path) { return !path.prefix.empty(); });
  const bool is_merge = request.sources.paths.size() > 1;
  if (is_merge || !wanted.renames.empty() || has_prefix) extra_files.changes_tensors = true;
  outcome.extra_files =
      reshard::plan_extra_files(object_store::files(), outcome.plan, reader, paths,
                                request.destination, request.create.format, extra_files);
  outcome.source_format = reader.format();
  auto& problems = outcome.plan.problems;
  problems.insert(problems.begin(), source.collisions.begin(), source.collisions.end());
  const auto& refused = outcome.extra_files.problems;
  problems.insert(problems.end(), refused.begin(), refused.end());
  const auto& file_notes = outcome.extra_files.notes;
  outcome.plan.notes.insert(outcome.plan.notes.end(), file_notes.begin(), file_notes.end());
  outcome.plan_digest = reshard::plan_digest(outcome.plan, reader.contents());
  return outcome;
}

/// Plans a move. Executes it, unless the plan has problems or this is a dry run.
Outcome run(const MoveRequest& request, Watch& watch) {
  FileSystem& fs = object_store::files();
  const bool is_on_store = object_store::is_on_store(request.destination);
  if (request.worker) object_store::require_local(request.destination);
  if (!request.spool.empty() && !is_on_store) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = request.destination}, "spool",
                          "a destination s3://BUCKET/PREFIX", "a local one");
  }
  check_destination(request, nullptr);
  const reshard::SourceFiles files;
  const formats::MergedCheckpoint source = open(request, files.file_system());
  const CheckpointReader& reader = *source.reader;
  reshard::FileStates source_files = files.states_of(reader);
  Outcome outcome = plan(request, source);
  outcome.source_files = std::move(source_files);
  check_destination(request, &outcome.extra_files.carried);
  if (!outcome.plan.problems.empty()) return outcome;
  formats::CreateOptions create = request.create;
  create.extra_files = outcome.extra_files.carried;
  create.safetensors.stem = outcome.extra_files.stem;
  reshard::add_changes_of_values(outcome.plan, reader);
  reshard::add_notes_of_writer(outcome.plan, reader, request.destination, create);
  if (is_on_store) {
    execute_to_store(request, reader, outcome, std::move(create), watch);
    return outcome;
  }
  ExecuteOptions comparison = request.execute;
  comparison.stop = watch.token();
  comparison.progress = watch.sink();
  comparison.source_path = reader.path();
  comparison.source_files = outcome.source_files;
  const auto begins = [&](std::uint64_t nbytes) {
    watch.expect(nbytes + reshard::nbytes_to_move(outcome.plan, create));
  };
  if (request.worker && !request.base.empty() && !request.dry_run) {
    const reshard::ComparisonShare share{request.worker->share, request.worker->num_shares};
    outcome.linked_nbytes = reshard::link_to_base_with_others(
        outcome.plan, reader, fs, request.base, request.destination, request.row_changes, create,
        share, comparison, begins);
  } else {
    outcome.linked_nbytes =
        reshard::link_to_base(outcome.plan, reader, fs, request.base, request.destination,
                              request.row_changes, create, comparison, begins);
  }
  if (request.dry_run) {
    reshard::check_move(outcome.plan, reader, fs, request.destination, create,
                        request.worker ? std::optional(request.worker->num_shares) : std::nullopt,
                        outcome.source_files);
    return outcome;
  }
  outcome.kept_nbytes = execute(request, reader, outcome, {fs, request.destination}, create, watch);
  if (create.overwrite == OverwritePolicy::replace) {
    try {
      outcome.left_over = formats::left_over_at(fs, request.destination);
    } catch (const Error& error) {  // no failure of the move: the new checkpoint is complete
      outcome.warnings.push_back("could not look for a rest of the old checkpoint: " +
                                 std::string(error.what()));
    }
  }
  return outcome;
}

/// Returns the extra files that are copied: tuples (name, size in bytes, text on an edit or None).
nb::list extra_files(const reshard::ExtraFilesPlan& files) {
  nb::list rows;
  for (const formats::ExtraFile& file : files.carried) {
    nb::object edit = nb::none();
    for (const auto& [name, what] : files.edits) {
      if (name == file.name) edit = text_to_python(what);
    }
    rows.append(nb::make_tuple(text_to_python(file.name), file.nbytes, edit));
  }
  return rows;
}

/// Returns the extra files that are not copied, as tuples (name, reason).
nb::list left_files(const reshard::ExtraFilesPlan& files) {
  nb::list rows;
  for (const auto& [name, why] : files.left) {
    rows.append(nb::make_tuple(text_to_python(name), text_to_python(why)));
  }
  return rows;
}

nb::dict summary(const MoveRequest& request, const Outcome& outcome) {
  const Plan& plan = outcome.plan;
  nb::dict result;
  result["source_format"] = text_to_python(outcome.source_format.name());
  result["format"] = text_to_python(request.create.format.name());
  result["world_size"] = plan.destination.world_size;
  result["num_tensors"] = plan.destination.tensors.size();
  result["num_values"] = plan.destination.values.size();
  result["num_aliases"] = plan.destination.aliases.size();
  result["nbytes"] = plan.nbytes_to_write;
  result["written"] =
      plan.problems.empty() && !request.dry_run && (!outcome.shared || outcome.shared->is_finished);
  result["kept_nbytes"] = outcome.kept_nbytes;
  result["linked_nbytes"] = outcome.linked_nbytes;
  result["plan"] = text_to_python(outcome.plan_digest);
  nb::list ranks;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    ranks.append(nb::make_tuple(share.num_pieces, share.nbytes));
  }
  result["ranks"] = ranks;
  nb::list overflows;
  for (const reshard::TensorOverflow& overflow : outcome.overflows) {
    const std::string& fqn = plan.destination.tensors[overflow.tensor_index].meta.fqn;
    overflows.append(
        nb::make_tuple(text_to_python(fqn), overflow.num_elements, overflow.largest_magnitude));
  }
  result["overflows"] = overflows;
  nb::dict underflows;
  for (const reshard::TensorUnderflow& underflow : outcome.underflows) {
    const std::string& fqn = plan.destination.tensors[underflow.tensor_index].meta.fqn;
    underflows[text_to_python(fqn)] = underflow.num_elements;
  }
  result["underflows"] = underflows;
  nb::dict changes;
  for (const reshard::FormatChangeCount& change : plan.changes) {
    changes[text_to_python(format_change_name(change.change))] = change.count;
  }
  result["changes"] = changes;
  nb::dict left_out;
  left_out["tensors"] = plan.left_out.tensors;
  left_out["values"] = plan.left_out.values;
  left_out["aliases"] = plan.left_out.aliases;
  result["left_out"] = left_out;
  result["uncast"] = plan.uncast.count;
  result["extra_files"] = extra_files(outcome.extra_files);
  result["left_files"] = left_files(outcome.extra_files);
  result["notes"] = findings_to_python(plan.notes);
  result["problems"] = findings_to_python(plan.problems);
  nb::list missing_parts;
  if (outcome.shared) {
    for (const auto& share : outcome.shared->missing) missing_parts.append(share.index);
  }
  result["missing_parts"] = missing_parts;
  nb::list warnings;
  for (const std::string& warning : outcome.warnings) warnings.append(text_to_python(warning));
  result["warnings"] = warnings;
  result["left_over"] = outcome.left_over ? text_to_python(*outcome.left_over) : nb::none();
  return result;
}

/// Reads the members of a dict that `_core.pyi` describes. An unknown or missing member is a bug in
/// Tessera, because Python files and extension come from one build.
class Members {
 public:
  explicit Members(const nb::dict& members) : members_(members) {}

  template <class T>
  void read(const char* name, T& value) {
    value = nb::cast<T>(take(name));
  }
  void read_bytes(const char* name, std::string& value) {
    value = string_of(nb::cast<nb::bytes>(take(name)));
  }
  void read_bytes(const char* name, std::vector<std::string>& values) {
    values = strings_of(nb::cast<std::vector<nb::bytes>>(take(name)));
  }
  void read_bytes(const char* name, std::vector<reshard::Rename>& values) {
    for (const auto& [from, to] : nb::cast<BytesPairs>(take(name))) {
      values.push_back({string_of(from), string_of(to)});
    }
  }
  void check_all_read() const { TESSERA_CHECK(num_read_ == members_.size()); }

 private:
  nb::object take(const char* name) {
    ++num_read_;
    return nb::object(members_[name]);
  }

  const nb::dict& members_;
  std::size_t num_read_ = 0;
};

MoveOptions move_options(const nb::dict& given) {
  MoveOptions options;
  Members members(given);
  members.read("prefer", options.prefer);
  members.read_bytes("prefixes", options.prefixes);
  members.read("keep_prefix", options.keep_prefix);
  members.read("to", options.to);
  members.read("world_size", options.world_size);
  members.read("strategy", options.strategy);
  members.read_bytes("plan", options.plan_path);
  members.read_bytes("mesh", options.mesh_path);
  members.read_bytes("like", options.like_path);
  members.read_bytes("units", options.units_path);
  members.read_bytes("flat_layout", options.flat_layout_path);
  members.read_bytes("as_dict", options.as_dict);
  members.read("compress", options.compress);
  members.read_bytes("base", options.base);
  members.read("changed_rows", options.changed_rows);
  members.read_bytes("only", options.only);
  members.read_bytes("rename", options.renames);
  members.read("drop_optimizer", options.drop_optimizer);
  members.read_bytes("optimizer_params", options.optimizer_params);
  members.read_bytes("recipe", options.recipe_path);
  members.read("inverse", options.inverse);
  members.read_bytes("set", options.settings);
  members.read("optimizer_names", options.optimizer_names);
  members.read("cast", options.cast);
  members.read("on_overflow", options.on_overflow);
  members.read("max_shard_size", options.max_shard_nbytes);
  members.read("device_mesh", options.device_mesh);
  members.read("allow_missing", options.allow_missing);
  members.read("allow_lossy", options.allow_lossy);
  members.read("as_is", options.as_is);
  members.read("extra_files", options.extra_files);
  members.read_bytes("extra_files_from", options.extra_files_folder);
  members.read("extra_files_limit", options.extra_files_nbytes);
  members.read("memory", options.memory_nbytes);
  members.read("threads", options.num_threads);
  members.read_bytes("spool", options.spool);
  members.read("endpoint", options.endpoint);
  members.read("dry_run", options.dry_run);
  members.read("overwrite", options.overwrite);
  members.read("resume", options.resume);
  members.read("discard", options.discard);
  members.read("part", options.part);
  members.read("take_over", options.take_over);
  members.check_all_read();
  return options;
}

/// Adds to an exception of `progress` that the destination is complete: as a note on the exception;
/// before Python 3.11, as a warning.
void tell_complete(const nb::python_error& error, const std::string& destination) {
  const std::string text =
      printable(destination) + " is complete: the exception came after the move";
  const nb::handle value = error.value();
  if (nb::hasattr(value, "add_note")) {
    value.attr("add_note")(text_to_python(text));
  } else {
    PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1);
    PyErr_Clear();  // if the warning was turned into an error: the caller raises `error` instead
  }
}

/// Sets the S3 server (`endpoint`) of all paths of a move that may be on an object store.
void set_endpoints(const std::vector<MergePath>& sources, const std::string& destination,
                   const MoveOptions& options) {
  if (!options.endpoint) return;
  for (const MergePath& source : sources) {
    object_store::set_bucket_endpoint(source.path, *options.endpoint);
  }
  for (const std::string& path : {destination, options.like_path, options.extra_files_folder}) {
    object_store::set_bucket_endpoint(path, *options.endpoint);
  }
}

nb::dict move(const BytesPairs& sources, const nb::bytes& destination, const nb::dict& options,
              const nb::object& progress) {
  std::vector<MergePath> paths;
  for (const auto& [path, prefix] : sources) paths.push_back({string_of(path), string_of(prefix)});
  const MoveOptions given = move_options(options);
  set_endpoints(paths, string_of(destination), given);
  // Files may have changed since an earlier call.
  for (const MergePath& source : paths) object_store::forget(source.path);
  for (const auto& path : {string_of(destination), given.like_path, given.extra_files_folder}) {
    object_store::forget(path);
  }
  MoveRequest request;
  run_interruptibly([&, to = string_of(destination)] {  // may open a checkpoint `like`
    request = make_move_request(std::move(paths), to, given);
  });
  Outcome outcome;
  std::atomic<bool> is_complete = false;
  try {
    run_watched(progress, [&](Watch& watch) {
      outcome = run(request, watch);
      is_complete = outcome.plan.problems.empty() && !request.dry_run &&
                    (!outcome.shared || outcome.shared->is_finished);
    });
  } catch (nb::python_error& error) {
    if (is_complete) tell_complete(error, request.destination);
    throw;
  }
  return summary(request, outcome);
}

}  // namespace

void bind_move(nb::module_& module) {
  module.def("move", &move, nb::arg("sources"), nb::arg("destination"), nb::arg("options"),
             nb::arg("progress").none());
}

}  // namespace tessera::python
