#include "ckpt-reshard/split_command.h"

#include <algorithm>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/detect.h"

namespace tessera::cli {
namespace {

using formats::CheckpointContents;

std::vector<std::string> whole_steps(std::vector<std::string> prefixes) {
  for (std::string& prefix : prefixes) {
    if (!prefix.ends_with('.')) prefix += '.';
  }
  return prefixes;
}

/// Returns the pattern that matches all that begins with `text`.
std::string pattern_of(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (std::string_view("*?[\\!").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern + "*";
}

/// Says whether a name of any kind fits.
template <class Fits>
bool has_name(const CheckpointContents& contents, const Fits& fits) {
  return std::ranges::any_of(contents.tensors, fits,
                             [](const auto& tensor) { return tensor.meta.fqn; }) ||
         std::ranges::any_of(contents.values, fits, &formats::ValueEntry::name) ||
         std::ranges::any_of(contents.aliases, fits, &formats::Alias::fqn);
}

/// A prefix that no name has is more likely a slip than a wish.
void check_prefixes(const CheckpointContents& contents, const std::vector<std::string>& prefixes) {
  for (const std::string& prefix : prefixes) {
    if (has_name(contents, [&](std::string_view name) { return name.starts_with(prefix); })) {
      continue;
    }
    const std::string whole = prefix.substr(0, prefix.size() - 1);
    if (has_name(contents, [&](std::string_view name) { return name == whole; })) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "--prefix", "what names lie under",
                            "'" + printable(whole) + "', a whole name",
                            "--only takes names as they are");
    }
    throw Error::expected(ErrorKind::invalid_argument, {}, "--prefix", "what a name begins with",
                          "'" + printable(prefix) + "'");
  }
}

}  // namespace

void add_split_command(CommandLine& line, SplitOptions& options, Terminal& terminal) {
  Command& command = line.add_command("split", "Moves a part of a checkpoint",
                                      [&] { return run_split(options, terminal); });
  command
      .describe(
          "The part is what lies under the prefixes, which names lose, and what --only adds under "
          "its own names; --drop-optimizer alone takes all but optimizers. The state of optimizers "
          "does not lie under its parameters' prefixes, so it is named apart.")
      .argument("SRC", options.source, "The checkpoint to read")
      .argument("DST", options.move.destination, "The checkpoint to write; must not exist")
      .option("--prefix", "PREFIX", options.prefixes, "Move names under it; repeatable")
      .flag("--keep-prefix", options.keep_prefix, "Leave names as they are");
  add_flat_layout_option(command, options.flat_layout_path);
  add_move_options(command, options.move);
  command.example("split step-1000 encoder.safetensors --prefix model.encoder", "One module")
      .example(
          "split step-1000 encoder --prefix encoder --only optim.state.encoder "
          "--rename optim.state.encoder.=optim.state.",
          "With the state of its parameters")
      .example("split step-1000 model --drop-optimizer", "All but the optimizer");
}

ExitCode run_split(const SplitOptions& options, Terminal& terminal) {
  if (options.prefixes.empty() && options.move.only.empty() && !options.move.drop_optimizer) {
    throw UsageError("split: one of --prefix, --only and --drop-optimizer is missing",
                     "ckpt-reshard split --help");
  }
  const std::vector<std::string> prefixes = whole_steps(options.prefixes);
  MoveOptions move = options.move;
  for (const std::string& prefix : prefixes) {
    move.only.push_back(pattern_of(prefix));
    if (!options.keep_prefix) move.dropped_prefixes.push_back(prefix);
  }
  const auto open = [&] {
    MoveSource source{formats::open_checkpoint(FileSystem::posix(), options.source,
                                               {.flat_layout_path = options.flat_layout_path})};
    check_prefixes(source.reader->contents(), prefixes);
    return source;
  };
  return run_move(move, {options.source}, open, terminal);
}

}  // namespace tessera::cli
