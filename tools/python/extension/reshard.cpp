#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "findings.h"
#include "jobs.h"
#include "python_value.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

using formats::CreateOptions;
using formats::Format;
using reshard::ExecuteOptions;
using reshard::Plan;
using reshard::PlanOptions;
using reshard::Relaxation;

constexpr std::uint64_t kMaxOptionFileNbytes = std::uint64_t{256} << 20;

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& found) {
  throw Error::expected(ErrorKind::invalid_argument, {}, option, expected,
                        "'" + printable(found) + "'");
}

std::string read_option_file(const std::string& path) {
  return read_file(FileSystem::posix(), path, kMaxOptionFileNbytes);
}

/// What `tessera.reshard` was asked for.
struct Request {
  std::string source;
  std::string destination;
  std::string flat_layout_path;
  bool dry_run = false;
  PlanOptions plan{};
  CreateOptions create{};
  ExecuteOptions execute{};
};

Format parse_format(const std::optional<std::string>& name, const std::string& destination) {
  if (!name) return formats::format_for_destination(destination);
  const auto format = formats::parse_format(*name);
  if (!format) refuse("to", "native, safetensors, dcp or torch", *name);
  return *format;
}

formats::NativeWriteOptions parse_compression(const std::string& text, Format format) {
  const auto options = formats::parse_compression(text);
  if (!options) refuse("compress", std::string(formats::kCompressions), text);
  if (options->compression != formats::NativeWriteOptions::Compression::none &&
      format != Format::native) {
    refuse("compress", "none, as only native is compressed", text);
  }
  return *options;
}

std::optional<DType> parse_cast(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  const auto dtype = parse_dtype(*name);
  if (!dtype) refuse("cast", dtype_expectation(*name), *name);
  return dtype;
}

reshard::OptimizerNames parse_names(const std::string& name) {
  const auto names = reshard::parse_optimizer_names(name);
  if (!names) refuse("optimizer_names", "as-stored, canonical or torchrec", name);
  return *names;
}

/// Plans, and moves unless that is only to be planned. Returns the plan and the source's format.
std::pair<Plan, Format> run(const Request& request, Watch& watch) {
  FileSystem& fs = FileSystem::posix();
  if (!request.dry_run) {
    formats::check_destination(fs, request.source, request.destination, request.create.overwrite,
                               "overwrite=True");
  }
  const auto reader =
      formats::open_checkpoint(fs, request.source, {.flat_layout_path = request.flat_layout_path});
  Plan plan = reshard::plan_reshard(reader->contents(), reader->path(), request.plan);
  if (plan.problems.empty() && !request.dry_run) {
    watch.set_total(plan.nbytes_to_write);
    ExecuteOptions execute = request.execute;
    execute.stop = watch.token();
    execute.progress = watch.sink();
    reshard::move_checkpoint(plan, *reader, fs, request.destination, request.create, execute);
  }
  return {std::move(plan), reader->format()};
}

nb::dict summary(const Request& request, const Plan& plan, Format source_format) {
  nb::dict result;
  result["source_format"] = text_to_python(format_name(source_format));
  result["format"] = text_to_python(format_name(request.create.format));
  result["world_size"] = plan.destination.world_size;
  result["num_tensors"] = plan.destination.tensors.size();
  result["num_values"] = plan.destination.values.size();
  result["num_aliases"] = plan.destination.aliases.size();
  result["nbytes"] = plan.nbytes_to_write;
  result["written"] = plan.problems.empty() && !request.dry_run;
  result["notes"] = findings_to_python(plan.notes);
  result["problems"] = findings_to_python(plan.problems);
  return result;
}

nb::dict reshard_checkpoint(const nb::bytes& source, const nb::bytes& destination,
                            const std::optional<std::string>& to, int world_size,
                            const std::string& strategy, const nb::bytes& plan_path,
                            const nb::bytes& units_path, const nb::bytes& flat_layout,
                            const std::string& compress, std::vector<std::string> only,
                            const std::vector<std::pair<std::string, std::string>>& rename,
                            const std::string& optimizer_names,
                            const std::optional<std::string>& cast, std::uint64_t max_shard_nbytes,
                            bool drop_optimizer, bool allow_missing, bool allow_lossy,
                            std::uint64_t memory_nbytes, int num_threads, bool dry_run,
                            bool overwrite, const nb::object& progress) {
  Request request{.source = string_of(source),
                  .destination = string_of(destination),
                  .flat_layout_path = string_of(flat_layout),
                  .dry_run = dry_run};
  const Format format = parse_format(to, request.destination);

  request.create.format = format;
  request.create.overwrite = overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse;
  request.create.native = parse_compression(compress, format);
  if (max_shard_nbytes != 0) {
    if (format != Format::safetensors) {
      refuse("max_shard_size", "to='safetensors'", std::string(format_name(format)));
    }
    request.create.safetensors.max_shard_nbytes = max_shard_nbytes;
  }
  request.execute = {.memory_nbytes = memory_nbytes, .num_threads = num_threads};

  PlanOptions& plan = request.plan;
  plan.format = format;
  plan.world_size = world_size;
  plan.strategy = strategy;
  plan.only = NameSelection(std::move(only));
  for (const auto& [from, into] : rename) plan.renames.push_back({from, into});
  plan.optimizer_names = parse_names(optimizer_names);
  plan.cast = parse_cast(cast);
  if (drop_optimizer) plan.optimizer = reshard::OptimizerPart::leave_out;
  if (allow_missing) plan.missing = Relaxation::allow;
  if (allow_lossy) plan.lossy = Relaxation::allow;
  if (const std::string path = string_of(plan_path); !path.empty()) {
    plan.table_plan = TablePlan::from_json(read_option_file(path), path);
  }
  if (const std::string path = string_of(units_path); !path.empty()) {
    plan.units = flat_units_from_json(read_option_file(path), path);
  }

  std::pair<Plan, Format> outcome;
  run_watched(progress, [&](Watch& watch) { outcome = run(request, watch); });
  return summary(request, outcome.first, outcome.second);
}

}  // namespace

void bind_reshard(nb::module_& module) {
  module.def("reshard", &reshard_checkpoint, nb::arg("source"), nb::arg("destination"),
             nb::kw_only(), nb::arg("to").none(), nb::arg("world_size"), nb::arg("strategy"),
             nb::arg("plan"), nb::arg("units"), nb::arg("flat_layout"), nb::arg("compress"),
             nb::arg("only"), nb::arg("rename"), nb::arg("optimizer_names"), nb::arg("cast").none(),
             nb::arg("max_shard_size"), nb::arg("drop_optimizer"), nb::arg("allow_missing"),
             nb::arg("allow_lossy"), nb::arg("memory"), nb::arg("threads"), nb::arg("dry_run"),
             nb::arg("overwrite"), nb::arg("progress").none());
}

}  // namespace tessera::python
