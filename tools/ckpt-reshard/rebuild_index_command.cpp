#include "ckpt-reshard/rebuild_index_command.h"

#include "object_store/files.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/native.h"

namespace tessera::cli {

void add_rebuild_index_command(CommandLine& line, RebuildIndexOptions& options,
                               Terminal& terminal) {
  line.add_command("rebuild-index", "Rebuilds the index of a native checkpoint",
                   [&] { return run_rebuild_index(options, terminal); })
      .describe(
          "The tool makes the index (index.h5) from the rank files alone. The new index is byte "
          "for byte the same as the original. It replaces an existing index once it is complete.")
      .argument("PATH", options.path, "The checkpoint's directory")
      .example("rebuild-index step-1000",
               "Repair a checkpoint whose index.h5 is missing or damaged");
}

ExitCode run_rebuild_index(const RebuildIndexOptions& options, Terminal& terminal) {
  object_store::require_local(options.path);
  formats::rebuild_native_index(FileSystem::posix(), options.path);
  terminal.print(printable(options.path, options.path.size() * 4) + ": index rebuilt\n");
  return ExitCode::done;
}

}  // namespace tessera::cli
