#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind_jobs.h"
#include "findings.h"
#include "move_request.h"
#include "python_value.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"
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
  Format source_format{};
  std::uint64_t kept_nbytes = 0;
  std::string plan_digest;
  std::optional<std::string> left_over;  // an old checkpoint that could not be removed
};

std::vector<std::string> strings_of(const std::vector<nb::bytes>& texts) {
  std::vector<std::string> strings;
  for (const nb::bytes& text : texts) strings.push_back(string_of(text));
  return strings;
}

formats::MergedCheckpoint open(const Sources& sources) {
  const FileSystem& fs = FileSystem::posix();
  const MergePath& first = sources.paths.front();
  if (sources.paths.size() > 1 || !first.prefix.empty()) {
    return formats::open_merged(fs, sources.paths, sources.preference);
  }
  return {formats::open_checkpoint(fs, first.path, {.flat_layout_path = sources.flat_layout_path}),
          {}};
}

/// Moves all bytes and commits. Returns how many bytes an interrupted move had moved.
std::uint64_t execute(const MoveRequest& request, const Plan& plan, const CheckpointReader& reader,
                      Watch& watch) {
  FileSystem& fs = FileSystem::posix();
  watch.set_total(plan.nbytes_to_write);
  ExecuteOptions options = request.execute;
  options.stop = watch.token();
  options.progress = watch.sink();
  const auto writer = reshard::start_move(plan, reader, fs, request.destination, request.create);
  return reshard::finish_or_keep(plan, reader, *writer, fs, request.destination, options);
}

/// Plans a move, and executes it unless this is a dry run.
Outcome run(const MoveRequest& request, Watch& watch) {
  FileSystem& fs = FileSystem::posix();
  for (const MergePath& source : request.sources.paths) {
    formats::check_destination(fs, source.path, request.destination, request.create.overwrite,
                               "overwrite=True");
  }
  const auto [reader, collisions] = open(request.sources);
  request.sources.prefixes.check_used(reader->contents(), "prefix");
  Plan plan = reshard::plan_reshard(reader->contents(), reader->path(), request.plan,
                                    reshard::find_gaps(*reader, request.plan.only));
  plan.problems.insert(plan.problems.begin(), collisions.begin(), collisions.end());
  std::uint64_t kept_nbytes = 0;
  std::optional<std::string> left_over;
  if (plan.problems.empty()) {
    if (request.dry_run) {
      reshard::check_move(plan, *reader, fs, request.destination, request.create);
    } else {
      kept_nbytes = execute(request, plan, *reader, watch);
      if (request.create.overwrite == OverwritePolicy::replace) {
        left_over = formats::left_over_at(fs, request.destination);
      }
    }
  }
  std::string digest = reshard::plan_digest(plan, reader->contents());
  return {std::move(plan), reader->format(), kept_nbytes, std::move(digest), std::move(left_over)};
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
  result["written"] = plan.problems.empty() && !request.dry_run;
  result["kept_nbytes"] = outcome.kept_nbytes;
  result["plan"] = text_to_python(outcome.plan_digest);
  nb::list ranks;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    ranks.append(nb::make_tuple(share.num_pieces, share.nbytes));
  }
  result["ranks"] = ranks;
  result["notes"] = findings_to_python(plan.notes);
  result["problems"] = findings_to_python(plan.problems);
  result["left_over"] = outcome.left_over ? text_to_python(*outcome.left_over) : nb::none();
  return result;
}

/// A dict of `_core.pyi`, read member by member. Python files and extension come from one build, so
/// an unknown or missing member is a bug in Tessera.
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
  members.read_bytes("units", options.units_path);
  members.read_bytes("flat_layout", options.flat_layout_path);
  members.read("compress", options.compress);
  members.read_bytes("only", options.only);
  members.read_bytes("rename", options.renames);
  members.read("drop_optimizer", options.drop_optimizer);
  members.read("optimizer_names", options.optimizer_names);
  members.read("cast", options.cast);
  members.read("max_shard_size", options.max_shard_nbytes);
  members.read("allow_missing", options.allow_missing);
  members.read("allow_lossy", options.allow_lossy);
  members.read("memory", options.memory_nbytes);
  members.read("threads", options.num_threads);
  members.read("dry_run", options.dry_run);
  members.read("overwrite", options.overwrite);
  members.read("resume", options.resume);
  members.read("discard", options.discard);
  members.check_all_read();
  return options;
}

nb::dict move(const BytesPairs& sources, const nb::bytes& destination, const nb::dict& options,
              const nb::object& progress) {
  std::vector<MergePath> paths;
  for (const auto& [path, prefix] : sources) paths.push_back({string_of(path), string_of(prefix)});
  const MoveRequest request =
      make_move_request(std::move(paths), string_of(destination), move_options(options));
  Outcome outcome;
  run_watched(progress, [&](Watch& watch) { outcome = run(request, watch); });
  return summary(request, outcome);
}

}  // namespace

void bind_move(nb::module_& module) {
  module.def("move", &move, nb::arg("sources"), nb::arg("destination"), nb::arg("options"),
             nb::arg("progress").none());
}

}  // namespace tessera::python
