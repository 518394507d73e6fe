#include "ckpt-reshard/move.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "arithmetic/lora_adapter.h"
#include "ckpt-reshard/dequantize_option.h"
#include "ckpt-reshard/incomplete_parts.h"
#include "ckpt-reshard/move_summary.h"
#include "ckpt-reshard/worker_options.h"
#include "cli/stop_signals.h"
#include "formats/source_overlap.h"
#include "formats/staging/extra_copies.h"
#include "formats/staging/shared_work.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "reshard/extra_files.h"
#include "reshard/value_changes.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/store_destination.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using reshard::Plan;
using reshard::PlanOptions;

/// Throws if the recorded command writes to another destination than the one that the user has
/// named for `finish`.
void require_folder(const formats::SharedWork& work, const std::string& folder) {
  const FileSystem& fs = object_store::files();
  const std::string found = fs.kind_of(work.path()) ? fs.resolve_links(work.path()) : work.path();
  if (found == folder) return;
  throw Error::expected(ErrorKind::mismatch, {.path = folder}, "destination of the workers",
                        "the same path in the recorded command of the workers", printable(found),
                        "was the folder moved? run any of the workers again with --resume");
}

/// The file system and the path at which a writer makes the checkpoint.
struct Place {
  FileSystem& fs;
  std::string path;
};

void note_nothing_to_resume(const std::string& destination, Terminal& terminal,
                            const std::string& further = {}) {
  terminal.print_error(
      "note: " + printable(formats::StagedDestination::staging_path_of(destination)) +
      ": no interrupted run to resume; started from the beginning" + further);
}

/// Moves all bytes and commits. Adds the results to `outcome`.
void move(const MoveOptions& options, const formats::CreateOptions& create, const Place& place,
          Outcome& outcome, const CheckpointReader& reader, Terminal& terminal,
          const std::stop_token& stop) {
  const Plan& plan = outcome.plan;
  const auto writer =
      reshard::start_move(plan, reader, place.fs, place.path, create, outcome.source_files);
  // Without a journal, the destination is a URL. Then the unfinished work is on the server, and
  // this message does not apply.
  if (options.resume && create.journal && !writer->is_resumed() && !options.quiet) {
    note_nothing_to_resume(place.path, terminal);
  }
  Progress progress(terminal, options.progress, options.progress.verb,
                    reshard::nbytes_to_move(plan, create));
  outcome.kept_nbytes = reshard::finish_or_keep(
      plan, reader, *writer, place.fs, place.path,
      {.memory_nbytes = options.memory_nbytes,
       .num_threads = options.num_threads,
       .stop = stop,
       .progress = [&](std::uint64_t nbytes) { progress.add(nbytes); },
       .resumed = [&](std::uint64_t nbytes) { progress.add_kept(nbytes); },
       .source_files = outcome.source_files,
       .overflowed = [&](const auto& overflow) { outcome.overflows.push_back(overflow); },
       .underflowed = [&](const auto& each) { outcome.underflows.push_back(each); },
       .reads_kept_blocks = outcome.combination || outcome.dequantized});
}

/// Moves all bytes to an object store; with `--dry-run`, only checks whether it could.
void move_to_store(const MoveOptions& options, formats::CreateOptions create, Outcome& outcome,
                   const CheckpointReader& reader, Terminal& terminal,
                   const std::stop_token& stop) {
  formats::KeptWork kept_work = create.journal->kept_work;
  if (options.dry_run && options.discard) kept_work = formats::KeptWork::resume;
  reshard::StoreDestination store(options.destination, {.format = create.format,
                                                        .overwrite = create.overwrite,
                                                        .kept_work = kept_work,
                                                        .overwrite_option = "--overwrite",
                                                        .extra_files = create.extra_files,
                                                        .spool = options.spool});
  // The local folder (the spool) is new for each run. What is to be resumed or replaced is on the
  // server.
  create.overwrite = OverwritePolicy::refuse;
  create.journal.reset();
  store.run([&] {
    const Place place{store.file_system(), store.path()};
    if (options.dry_run) {
      reshard::check_move(outcome.plan, reader, place.fs, place.path, create, std::nullopt,
                          outcome.source_files);
    } else {
      move(options, create, place, outcome, reader, terminal, stop);
    }
  });
}

/// If there is a base checkpoint, compares the new one with it, and sets in `create` which files of
/// the base get hard links.
void link_to_base(const MoveOptions& options, const std::optional<PartOfWork>& part,
                  formats::CreateOptions& create, Outcome& outcome, const CheckpointReader& reader,
                  Terminal& terminal, const std::stop_token& stop) {
  FileSystem& fs = object_store::files();
  std::optional<Progress> progress;
  const auto begins = [&](std::uint64_t nbytes) {
    progress.reset();
    progress.emplace(terminal, options.progress, "compare", nbytes);
  };
  const reshard::ExecuteOptions execute{
      .memory_nbytes = options.memory_nbytes,
      .num_threads = options.num_threads,
      .stop = stop,
      .progress = [&](std::uint64_t nbytes) { progress->add(nbytes); },
      .source_path = reader.path(),
      .source_files = outcome.source_files};
  const bool finishes = !options.worker.finished_folder.empty();
  const auto row_changes =
      options.changed_rows ? reshard::RowChanges::write_rows : reshard::RowChanges::write_piece;
  if (options.base.empty() || options.dry_run || (!part && !finishes)) {
    outcome.linked_nbytes =
        reshard::link_to_base(outcome.plan, reader, fs, options.base, options.destination,
                              row_changes, create, execute, begins);
    return;
  }
  reshard::ComparisonShare share;
  if (part) {
    share = {.index = part->index, .num_shares = part->num_parts};
  } else {
    share.num_shares = formats::SharedWork(fs, options.destination).num_shares();
  }
  outcome.linked_nbytes =
      reshard::link_to_base_with_others(outcome.plan, reader, fs, options.base, options.destination,
                                        row_changes, create, share, execute, begins);
}

/// Writes the share of one worker, or finishes the shares of all workers.
void move_with_others(const MoveOptions& options, const std::optional<PartOfWork>& part,
                      const formats::CreateOptions& create, Outcome& outcome,
                      const CheckpointReader& reader, Terminal& terminal,
                      const std::stop_token& stop) {
  FileSystem& fs = object_store::files();
  const formats::SharedWork work(fs, options.destination);
  if (!options.worker.finished_folder.empty()) {
    require_folder(work, options.worker.finished_folder);
    outcome.num_shares = work.num_shares();
    outcome.shared = reshard::finish_shares(outcome.plan, reader, fs, options.destination, create,
                                            stop, outcome.source_files);
    if (!outcome.shared->is_finished) {
      std::vector<formats::SharedWork::Incomplete> parts;
      for (const auto& share : outcome.shared->missing) parts.push_back({share.index, share.state});
      refuse_incomplete(options.destination, outcome.num_shares, parts);
    }
    return;
  }
  std::optional<Progress> progress;
  bool has_note = options.resume && !options.quiet && !work.is_begun();
  outcome.num_shares = part->num_parts;
  outcome.shared = reshard::move_share(
      outcome.plan, reader, fs, options.destination, create,
      {.share = part->index,
       .num_shares = part->num_parts,
       .other_shares = options.worker.take_over ? reshard::SharedMoveOptions::OtherShares::take_over
                                                : reshard::SharedMoveOptions::OtherShares::leave,
       .command = command_to_text(options.worker.arguments),
       .begins =
           [&](int, std::uint64_t nbytes) {
             if (std::exchange(has_note, false)) {
               const bool replaces = fs.kind_of(options.destination).has_value();
               note_nothing_to_resume(
                   options.destination, terminal,
                   replaces ? ", to replace " + printable(options.destination) +
                                  " (if the workers had completed it before, stop this one, then "
                                  "`ckpt-reshard finish " +
                                  printable(options.destination) + " --discard`)"
                            : "");
             }
             progress.reset();
             progress.emplace(terminal, options.progress, options.progress.verb, nbytes);
           },
       .warns =
           [&](const std::string& warning) {
             terminal.print_error("warning: " + printable(options.destination) + ": " + warning);
           }},
      {.memory_nbytes = options.memory_nbytes,
       .num_threads = options.num_threads,
       .stop = stop,
       .progress = [&](std::uint64_t nbytes) { progress->add(nbytes); },
       .resumed = [&](std::uint64_t nbytes) { progress->add_kept(nbytes); },
       .source_files = outcome.source_files,
       .overflowed = [&](const auto& overflow) { outcome.overflows.push_back(overflow); },
       .underflowed = [&](const auto& each) { outcome.underflows.push_back(each); },
       .reads_kept_blocks = outcome.combination || outcome.dequantized});
  for (const auto& written : outcome.shared->shares) outcome.kept_nbytes += written.resumed_nbytes;
}

/// Refuses the path `-`, because with ckpt-inspect it means standard input. A file with that name
/// is `./-`.
void refuse_standard_input(const std::string& path) {
  if (path != "-") return;
  throw UsageError(
      "SRC: expected a path, found '-' (only ckpt-inspect reads standard input; save it to a file)",
      "ckpt-reshard --help");
}

void warn_of_left_over(const FileSystem& fs, const std::string& destination, Terminal& terminal) {
  try {
    const auto left_over = formats::left_over_at(fs, destination);
    if (!left_over) return;
    terminal.print_error("warning: " + printable(*left_over) +
                         ": could not remove the old checkpoint (remove it yourself)");
  } catch (const Error& error) {  // no failure of the move: the new checkpoint is complete
    terminal.print_error("warning: could not look for a rest of the old checkpoint: " +
                         std::string(error.what()));
  }
}

/// Throws if a source or DST is `-`, or if the move may not write to DST (check_destination). Null
/// `extra_files`: not known yet; an existing directory DST is then not checked. For `--resume` and
/// `--overwrite` with DST on an object store, checks only that it is not a source.
void check_paths(const MoveOptions& options, const std::vector<std::string>& paths,
                 const std::vector<formats::ExtraFile>* extra_files) {
  if (options.destination == "-") {
    throw UsageError("DST: expected a path, found '-' (nothing is written to standard output)",
                     "ckpt-reshard --help");
  }
  const FileSystem& fs = object_store::files();
  // StoreDestination checks what is on the object store: an interrupted run may have left it.
  const bool is_checked_later = (options.resume || options.discard ||
                                 overwrite_policy(options) == OverwritePolicy::replace) &&
                                object_store::is_on_store(options.destination);
  const bool may_hold_extra_files =
      !is_checked_later && fs.kind_of(options.destination) == FileKind::directory;
  for (const std::string& path : paths) {
    refuse_standard_input(path);
    if (is_checked_later) {
      formats::require_apart(fs, path, options.destination);
      continue;
    }
    if (extra_files == nullptr && may_hold_extra_files) continue;
    formats::check_destination(fs, path, options.destination, overwrite_policy(options),
                               "--overwrite",
                               extra_files ? *extra_files : std::vector<formats::ExtraFile>());
  }
}

/// Opens the source, and dequantizes it if asked. If that finds no problems, also gives names to an
/// optimizer's numbered parameters and applies a recipe, as the options say.
MoveSource open_source(const MoveOptions& options, const OptionFiles& files,
                       const std::vector<std::string>& paths, const NameSelection& only,
                       const std::function<MoveSource(const FileSystem& fs)>& open,
                       const FileSystem& fs) {
  MoveSource source = open(fs);
  formats::require_classes_found(options.as_dict, {&source.reader->contents()}, "--as-dict");
  if (!source.combination) {
    source.reader = apply_dequantize(std::move(source.reader), fs, paths, options, source.problems,
                                     source.dequantized, source.losses);
  }
  if (source.dequantized && !source.dequantized->has_weights && source.problems.empty()) {
    source.problems.push_back({.rule = "dequantize",
                               .where = {.path = source.reader->path()},
                               .expected = "quantized weights",
                               .found = "none"});
  }
  if (source.problems.empty()) {
    source.reader = reshard::apply_params_and_recipe(
        std::move(source.reader),
        options.optimizer_params.empty() ? nullptr : &files.optimizer_params, only,
        [&](std::unique_ptr<CheckpointReader> reader) {
          return apply_recipe(std::move(reader), files.recipe);
        });
  }
  source.prefixes.check_used(source.reader->contents(), "--prefix");
  return source;
}

/// Adds to `files.left` (the extra files that are not copied) those of the second and later paths
/// of a combination: of `num_sources` sources, then of adapters. Skips a file that the first source
/// or --extra-files-from has, byte for byte.
void leave_files_of_others(const std::vector<std::string>& paths, std::size_t num_sources,
                           const MoveOptions& options, const Plan& plan,
                           const CheckpointReader& reader, reshard::ExtraFilesPlan& files) {
  const FileSystem& fs = object_store::files();
  const std::string& first =
      options.extra_files_folder.empty() ? paths.front() : options.extra_files_folder;
  std::set<std::string> left;
  for (const auto& file : files.left) left.insert(file.name);
  for (std::size_t p = 1; p < paths.size(); ++p) {
    const bool is_adapter = p >= num_sources;
    const reshard::ExtraFilesPlan others = reshard::plan_extra_files(
        fs, plan, reader, {paths[p]}, options.destination, *options.format,
        {.policy = reshard::ExtraFilesPolicy::leave, .max_nbytes = 0, .folder = {}});
    std::vector<std::string> added;
    for (const auto& [name, why] : others.left) {
      if (is_adapter && name == arithmetic::kAdapterConfigName) continue;  // it was applied
      const std::string other = join_path(paths[p], name);
      const std::string own = join_path(first, name);
      const bool is_same = fs.kind_of(own) == FileKind::regular &&
                           fs.kind_of(other) == FileKind::regular &&
                           formats::have_equal_bytes(fs, own, other);
      if (is_same || !left.insert(name).second) continue;
      files.left.push_back({name, is_adapter ? "of an adapter" : "of a later source"});
      added.push_back(name);
    }
    if (options.extra_files == reshard::ExtraFilesPolicy::refuse && !added.empty()) {
      files.problems.push_back(reshard::refusal_of_extra_files(paths[p], added));
    }
  }
  std::ranges::sort(files.left, {}, &reshard::ExtraFilesPlan::Left::name);
}

Outcome plan_move(const MoveOptions& options, const PlanOptions& wanted,
                  const std::vector<std::string>& paths, const MoveSource& source) {
  const CheckpointReader& reader = *source.reader;
  Outcome outcome{reshard::plan_reshard(reader.contents(), reader.path(), wanted,
                                        reshard::find_gaps(reader, wanted.only)),
                  {}};
  outcome.combination = source.combination;
  outcome.dequantized = source.dequantized;
  // For `combine`, only the first source's files describe the new model.
  const std::vector<std::string> described =
      source.combination ? std::vector{paths.front()} : paths;
  std::optional<reshard::CastDTypes> widened;
  if (!source.widened.empty()) widened = {source.widened, *wanted.cast};
  outcome.extra_files = reshard::plan_extra_files(
      object_store::files(), outcome.plan, reader, described, options.destination, *options.format,
      {.policy = options.extra_files,
       .max_nbytes = options.extra_files_nbytes,
       .folder = options.extra_files_folder,
       .preference = options.preference,
       .removes_quantization = source.dequantized.has_value(),
       .changes_tensors = source.combination || paths.size() > 1 || options.drop_optimizer ||
                          !wanted.renames.empty() ||
                          std::ranges::any_of(options.source_prefixes,
                                              [](const auto& prefix) { return !prefix.empty(); }),
       .merges_adapters = source.combination && !source.combination->adapters.empty(),
       .is_converted = !options.recipe.path.empty(),
       .widened = std::move(widened)});
  if (source.combination) {
    leave_files_of_others(paths, source.combination->num_sources, options, outcome.plan, reader,
                          outcome.extra_files);
  }
  auto& problems = outcome.plan.problems;
  problems.insert(problems.begin(), source.problems.begin(), source.problems.end());
  const auto& refused = outcome.extra_files.problems;
  problems.insert(problems.end(), refused.begin(), refused.end());
  const auto& file_notes = outcome.extra_files.notes;
  outcome.plan.notes.insert(outcome.plan.notes.end(), file_notes.begin(), file_notes.end());
  return outcome;
}

/// Adds the result of an earlier step to those of the cast. If the cast has a result for this
/// tensor, calls `unite` with that result instead. Requires: `results` are sorted by tensor.
template <class Result, class Unite>
void add_earlier(std::vector<Result>& results, const Result& earlier, const Unite& unite) {
  const auto cast =
      std::ranges::lower_bound(results, earlier.tensor_index, {}, &Result::tensor_index);
  if (cast == results.end() || cast->tensor_index != earlier.tensor_index) {
    results.insert(cast, earlier);
  } else {
    unite(*cast);
  }
}

/// Adds to `outcome` the sums and dequantized numbers that became zero or too large by rounding.
void add_losses(const arithmetic::RoundingLosses& losses, const CheckpointReader& reader,
                Outcome& outcome) {
  // The earlier step made these numbers the largest finite ones (saturate) or infinite. The cast
  // has counted the largest ones again. It counts infinite ones again only if it casts to
  // float8_e4m3fn, which has no infinity.
  const bool is_saturated = outcome.plan.on_overflow == reshard::OnOverflow::saturate;
  outcome.losses_before_recipe = losses.all();
  const std::vector<formats::TensorEntry>& tensors = reader.contents().tensors;
  for (std::size_t i = 0; i < outcome.plan.copies.size(); ++i) {
    const std::string& name = tensors[outcome.plan.copies[i].source_tensor].meta.fqn;
    const auto found = outcome.losses_before_recipe.find(name);
    if (found == outcome.losses_before_recipe.end()) continue;
    const CastLosses& lost = found->second;
    if (lost.num_too_large > 0) {
      add_earlier(
          outcome.overflows, {i, lost.num_too_large, lost.largest_magnitude},
          [&](reshard::TensorOverflow& cast) {
            const bool is_found_again =
                is_saturated ||
                outcome.plan.destination.tensors[i].meta.dtype == DType::float8_e4m3fn;
            cast.num_elements = is_found_again ? std::max(cast.num_elements, lost.num_too_large)
                                               : cast.num_elements + lost.num_too_large;
            cast.largest_magnitude = std::max(cast.largest_magnitude, lost.largest_magnitude);
          });
    }
    if (lost.num_became_zero > 0) {
      add_earlier(
          outcome.underflows, {i, lost.num_became_zero},
          [&](reshard::TensorUnderflow& cast) { cast.num_elements += lost.num_became_zero; });
    }
    outcome.losses_before_recipe.erase(found);
  }
}

/// Prints the result of a move. If standard output cannot be written, only warns, because the
/// destination is complete.
void print_complete(const MoveOptions& options, const Outcome& outcome,
                    const CheckpointReader& reader, std::chrono::steady_clock::time_point start,
                    Terminal& terminal) {
  const auto warn = [&](std::string_view why) {
    terminal.print_error("warning: " + printable(options.destination) + " is complete, but " +
                         std::string(why));
  };
  try {
    print_outcome(options, outcome, reader, start, terminal);
    terminal.flush();
  } catch (const OutputClosed&) {
    warn("the summary was not printed: standard output was closed");
  } catch (const Error& error) {
    warn("the summary was not printed: " + std::string(error.what()));
  }
}

/// Sets options that depend on others, and checks all of them. Returns the part that this worker
/// writes; nothing if one process does the whole move, or if this run is `finish`.
std::optional<PartOfWork> settle_options(MoveOptions& options) {
  const bool is_on_store = object_store::is_on_store(options.destination);
  if (!options.format) options.format = formats::format_for_destination(options.destination);
  check_options(options);
  const bool finishes = !options.worker.finished_folder.empty();
  auto part = finishes ? std::nullopt : part_of_worker(options.worker);
  if (part || finishes) object_store::require_local(options.destination);
  if (!options.base.empty() && is_on_store) {
    throw UsageError("--base: expected a local DST, found one on an object store",
                     "ckpt-reshard --help");
  }
  if (!options.spool.empty() && !is_on_store) {
    throw UsageError("--spool: expected DST on s3://BUCKET/PREFIX, found a local DST",
                     "ckpt-reshard --help");
  }
  if (options.quiet && options.progress.display == ProgressDisplay::automatic) {
    options.progress.display = ProgressDisplay::none;
  }
  return part;
}

/// Writes the destination as planned; with `--dry-run`, only checks whether it could. Adds the
/// results to `outcome`.
void write_destination(const MoveOptions& options, const std::optional<PartOfWork>& part,
                       formats::CreateOptions create, Outcome& outcome,
                       const CheckpointReader& reader, Terminal& terminal,
                       const std::stop_token& stop) {
  FileSystem& fs = object_store::files();
  link_to_base(options, part, create, outcome, reader, terminal, stop);
  if (object_store::is_on_store(options.destination)) {
    move_to_store(options, create, outcome, reader, terminal, stop);
  } else if (options.dry_run) {
    reshard::check_move(outcome.plan, reader, fs, options.destination, create,
                        part ? std::optional(part->num_parts) : std::nullopt, outcome.source_files);
  } else if (part || !options.worker.finished_folder.empty()) {
    move_with_others(options, part, create, outcome, reader, terminal, stop);
    if (options.overwrite && outcome.shared->is_finished) {
      warn_of_left_over(fs, options.destination, terminal);
    }
  } else {
    move(options, create, {fs, options.destination}, outcome, reader, terminal, stop);
    if (options.overwrite) warn_of_left_over(fs, options.destination, terminal);
  }
}

}  // namespace

ExitCode run_move(MoveOptions options, const std::vector<std::string>& paths,
                  const std::function<MoveSource(const FileSystem& fs)>& open, Terminal& terminal) {
  const std::optional<PartOfWork> part = settle_options(options);
  check_paths(options, paths, nullptr);
  const OptionFiles files(options, paths);
  PlanOptions wanted = plan_options(options, files);
  for (const std::string& path : paths) {
    if (!wanted.cast || !wanted.quantization_method.empty()) break;
    wanted.quantization_method = quantization_method(object_store::files(), path, options);
  }
  StopSignals signals;
  const reshard::SourceFiles source_fs;
  const MoveSource source =
      open_source(options, files, paths, wanted.only, open, source_fs.file_system());
  options.num_threads = checked_num_threads(options.num_threads, "ckpt-reshard --help");
  wanted.num_unordered_dicts = source.num_unordered_dicts;
  const CheckpointReader& reader = *source.reader;
  reshard::FileStates source_files = source_fs.states_of(reader);
  Outcome outcome = plan_move(options, wanted, paths, source);
  outcome.source_files = std::move(source_files);
  const Plan& plan = outcome.plan;
  check_paths(options, paths, &outcome.extra_files.carried);
  const auto print_notes = [&] {
    if (!options.quiet) print_findings("note: ", plan.notes, terminal);
    warn_of_optimizer_keys(plan.changes, terminal);
  };
  try {
    reshard::add_changes_of_values(outcome.plan, reader);
    reshard::add_notes_of_writer(outcome.plan, reader, options.destination,
                                 {.format = *options.format,
                                  .extra_files = outcome.extra_files.carried,
                                  .keeps_names = keeps_names(options)});
  } catch (const Error&) {
    print_notes();  // they may tell why the writer refuses
    throw;
  }
  print_notes();
  if (!plan.problems.empty()) {
    print_findings("ckpt-reshard: ", plan.problems, terminal);
    if (options.json) print_json(options, outcome, reader, terminal);
    return ExitCode::bad_input;
  }
  const auto start = std::chrono::steady_clock::now();
  formats::CreateOptions create = create_options(options, files, wanted);
  create.extra_files = outcome.extra_files.carried;
  create.safetensors.stem = outcome.extra_files.stem;
  write_destination(options, part, std::move(create), outcome, reader, terminal, signals.token());
  add_losses(*source.losses, reader, outcome);
  if (options.dry_run) {
    print_outcome(options, outcome, reader, start, terminal);
  } else {
    print_complete(options, outcome, reader, start, terminal);
  }
  return ExitCode::done;
}

}  // namespace tessera::cli
