#include "cli/launcher.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/command_line.h"
#include "cli/part_option.h"

namespace tessera::cli {
namespace {

/// The environment variables that one launcher sets. The launcher is recognised if `index` is set,
/// and, unless `count` is null, if `count` is set too.
struct LauncherVariables {
  const char* index;
  const char* count;  // null: the launcher has no such variable
  const char* first;  // variable with the smallest index; null: indices begin at 0
};

// Slurm's job array is before Slurm's tasks, because a job of an array sets the variables of both.
constexpr LauncherVariables kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", nullptr},
    {"PMI_RANK", "PMI_SIZE", nullptr},
    {"RANK", "WORLD_SIZE", nullptr},
    {"SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"},
    {"SLURM_PROCID", "SLURM_NTASKS", nullptr},
    {"JOB_COMPLETION_INDEX", nullptr, nullptr},
};

std::optional<int> number_in(const char* variable) {
  const char* const text = variable == nullptr ? nullptr : std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  const auto number = parse_int(text);
  if (!number || *number < 0) {
    throw UsageError(
        std::string(variable) + ": expected a number of 0 or more, found '" + printable(text) + "'",
        "ckpt-reshard --help");
  }
  return number;
}

/// Returns whether a job of the array has several tasks. Then several processes have the same array
/// index.
bool has_several_tasks() {
  return number_in("SLURM_NTASKS").value_or(1) > 1;
}

}  // namespace

std::optional<LaunchedProcess> find_launched_process() {
  for (const LauncherVariables& launcher : kLaunchers) {
    const bool is_array = std::string_view(launcher.index) == "SLURM_ARRAY_TASK_ID";
    if (is_array && has_several_tasks()) continue;
    auto index = number_in(launcher.index);
    const auto count = number_in(launcher.count);
    if (!index || (launcher.count != nullptr && !count)) continue;
    *index -= number_in(launcher.first).value_or(0);
    if (count && (*index < 0 || *index >= *count)) {
      const std::int64_t first = number_in(launcher.first).value_or(0);
      throw UsageError(std::string(launcher.index) + ": expected a number from " +
                           std::to_string(first) + " to " + std::to_string(first + *count - 1) +
                           " (" + launcher.count + ": " + std::to_string(*count) + "), found '" +
                           std::getenv(launcher.index) + "'" +
                           (is_array ? " (a job array needs steps of 1)" : ""),
                       "ckpt-reshard --help");
    }
    return LaunchedProcess{*index, count.value_or(0), launcher.index};
  }
  return std::nullopt;
}

std::string launcher_variables_in_words() {
  std::string words;
  for (const LauncherVariables& launcher : kLaunchers) {
    words += (words.empty() ? "" : ", ") + std::string(launcher.index);
  }
  return words;
}

}  // namespace tessera::cli
