#include "ckpt-reshard/merge_command.h"

#include <cstddef>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {
namespace {

using formats::MergePath;
using formats::MergePreference;

/// Parses `PATH` or `PREFIX=PATH`. A prefix has no slash, so `./a=b` is a path.
MergePath parse_source(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || text.find('/') < equals) return {.path = text};
  MergePath source{.path = text.substr(equals + 1), .prefix = text.substr(0, equals)};
  if (source.prefix.empty() || source.prefix == "." || source.path.empty()) {
    throw UsageError("SRC: expected PATH or PREFIX=PATH, found '" + printable(text) + "'",
                     "ckpt-reshard merge --help");
  }
  return source;
}

}  // namespace

void add_merge_command(CommandLine& line, MergeOptions& options, Terminal& terminal) {
  Command& command = line.add_command("merge", "Moves several checkpoints into one",
                                      [&] { return run_merge(options, terminal); });
  command
      .describe(
          "PREFIX=SRC puts PREFIX and a dot before every name in SRC. Write a path that contains = "
          "as ./a=b. Ranks keep their pieces, unless options change that. If several sources have "
          "the same name, the tool lists all such names and stops, unless you give --prefer.")
      .argument("SRC", options.first_source, "A checkpoint to read, or PREFIX=SRC")
      .argument("SRC", options.second_source, "A second one, or PREFIX=SRC")
      .arguments("SRC...", options.more_sources, "More checkpoints to read")
      .argument("DST", options.move.destination,
                "The checkpoint to write. It must not exist, unless you give --overwrite")
      .choice(
          "--prefer", {"first", "last"},
          [&](const std::string& which) {
            options.preference = which == "first" ? MergePreference::first : MergePreference::last;
          },
          "If several sources have a name, take it from the first or the last of them");
  add_base_option(command, options.move);
  add_move_options(command, options.move);
  command
      .example("merge model.safetensors optim=optimizer.pt step-1000",
               "Join a model and its optimizer, saved in two files")
      .example("merge base lora=adapter merged", "Join a model and an adapter")
      .example("merge base patch merged --prefer last", "Replace some tensors of a model");
}

ExitCode run_merge(const MergeOptions& options, Terminal& terminal) {
  std::vector<MergePath> sources{parse_source(options.first_source),
                                 parse_source(options.second_source)};
  for (const std::string& text : options.more_sources) sources.push_back(parse_source(text));
  std::vector<std::string> paths;
  MoveOptions move = options.move;
  move.preference = options.preference;
  for (const MergePath& source : sources) {
    paths.push_back(source.path);
    move.source_prefixes.push_back(source.prefix);
  }
  const auto open = [&](const FileSystem& fs) {
    auto [reader, collisions, num_unordered_dicts] =
        formats::open_merged(fs, sources, options.preference, options.move.as_dict);
    return MoveSource{.reader = std::move(reader),
                      .problems = std::move(collisions),
                      .num_unordered_dicts = num_unordered_dicts};
  };
  return run_move(move, paths, open, terminal);
}

}  // namespace tessera::cli
