#include "ckpt-reshard/worker_options.h"

#include <filesystem>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "cli/launcher.h"
#include "tessera/base/value.h"

namespace tessera::cli {
namespace {

constexpr const char* kArguments = "arguments";
constexpr const char* kDirectory = "directory";

[[noreturn]] void refuse_option(const std::string& option, const std::string& expected,
                                const std::string& found) {
  throw UsageError(option + ": expected " + expected + ", found '" + printable(found) + "'",
                   "ckpt-reshard --help");
}

PartOfWork launched_part(const std::string& workers) {
  const bool is_auto = workers == "auto";
  const int given = is_auto ? 0 : parse_int(workers).value_or(0);
  if (!is_auto && (given < 1 || given > kMaxParts)) {
    refuse_option("--workers", "auto, or a number from 1 to " + std::to_string(kMaxParts), workers);
  }
  const auto launched = find_launched_process();
  if (!launched) {
    throw UsageError("--workers: expected a launcher's variables (" +
                         launcher_variables_in_words() +
                         "), or --part I/N instead, found none of them",
                     "ckpt-reshard --help");
  }
  if (is_auto && launched->num_processes == 0) {
    refuse_option("--workers",
                  "a number, because the launcher that sets " + launched->index_variable +
                      " does not give the number of workers",
                  "auto");
  }
  const PartOfWork part{launched->index, is_auto ? launched->num_processes : given};
  if (launched->num_processes != 0 && part.num_parts != launched->num_processes) {
    refuse_option("--workers",
                  std::to_string(launched->num_processes) + ", as many as the launcher has started",
                  workers);
  }
  if (part.index >= part.num_parts) {
    refuse_option(
        "--workers",
        "more than " + launched->index_variable + ", which is " + std::to_string(part.index),
        workers);
  }
  return part;
}

}  // namespace

void add_worker_options(Command& command, WorkerOptions& options) {
  command
      .option("--part", "I/N", options.part,
              "Write part I of N (I from 0 to N-1), while other workers write the other parts. The "
              "worker that ends last completes DST")
      .option("--workers", "N", options.workers,
              "Like --part I/N, but the launcher (Slurm, MPI, torchrun, Kubernetes) gives I. auto: "
              "the launcher gives N, too")
      .flag("--take-over", options.take_over,
            "After its own part, also write the parts of workers that died or never started");
}

std::optional<PartOfWork> part_of_worker(const WorkerOptions& options) {
  if (!options.part.empty() && !options.workers.empty()) {
    throw UsageError("--part: expected either --part or --workers, found both",
                     "ckpt-reshard --help");
  }
  if (!options.part.empty()) return parse_part("--part", options.part, "ckpt-reshard --help");
  if (!options.workers.empty()) return launched_part(options.workers);
  if (options.take_over) {
    throw UsageError("--take-over: expected --part or --workers with it, found neither",
                     "ckpt-reshard --help");
  }
  return std::nullopt;
}

std::string command_to_text(const std::vector<std::string>& arguments) {
  Value::List list;
  for (const std::string& argument : arguments) list.emplace_back(argument);
  Value::Dict members;
  members.emplace_back(kArguments, std::move(list));
  members.emplace_back(kDirectory, std::filesystem::current_path().string());
  return value_to_json(Value(std::move(members))) + "\n";
}

std::optional<RecordedCommand> command_from_text(const std::string& text, const std::string& path) {
  if (text.empty()) return std::nullopt;
  const Value value = value_from_json(parse_json(text, path), path);
  const auto* members = value.get_if<Value::Dict>();
  if (members == nullptr) return std::nullopt;
  RecordedCommand command;
  for (const auto& [key, member] : *members) {
    const auto* name = key.get_if<std::string>();
    if (name == nullptr) continue;
    if (const auto* said = member.get_if<std::string>(); said != nullptr && *name == kDirectory) {
      command.directory = *said;
    }
    const auto* list = member.get_if<Value::List>();
    if (list == nullptr || *name != kArguments) continue;
    for (const Value& argument : *list) {
      if (const auto* said = argument.get_if<std::string>()) command.arguments.push_back(*said);
    }
  }
  if (command.arguments.empty()) return std::nullopt;
  return command;
}

}  // namespace tessera::cli
