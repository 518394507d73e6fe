#include "runtime/state/save_job.h"

#include "runtime/state/load_problems.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/executor.h"

namespace tessera::state {
namespace {

/// Removes older checkpoints. If that fails, the error says that the new one is complete.
void remove_older(FileSystem& fs, const std::string& path, int num_kept) {
  try {
    formats::keep_last(fs, directory_of(path), num_kept, last_component(path));
  } catch (const Error& error) {
    throw Error(error.kind(), error.where(),
                std::string(error.reason()) + " (the new checkpoint " + path +
                    " is complete; older ones could not be removed)");
  }
}

}  // namespace

formats::Format format_of_parts(formats::Format format) {
  return formats::traits_of(format).is_written_in_parts ? format : formats::Format();
}

void SaveJob::start_one_file() {
  OneFile file;
  file.plan = reshard::plan_reshard(contents, path, {.format = options.format});
  refuse_problems(path, file.plan.problems);
  std::vector<Value> moved;
  for (const std::size_t i : file.plan.value_sources) moved.push_back(values[i]);
  file.writer = formats::create_checkpoint(
      *options.file_system, path, file.plan.destination, std::move(moved),
      {.format = options.format, .overwrite = options.overwrite});
  one_file = std::move(file);
}

void SaveJob::run(Rendezvous& rendezvous) {
  FileSystem& fs = *options.file_system;
  const int rank = rendezvous.rank();
  const formats::PartOptions part_options{format_of_parts(options.format), options.native};
  rendezvous.all_gather("writing " + directory, [&] {
    raise_failure();
    const auto writer = formats::create_part(fs, directory, contents, values, rank, part_options);
    const LiveSource reader(held_contents(*live, rank), std::move(held));
    reshard::execute(*plan, reader, *writer, {.memory_nbytes = options.memory_nbytes});
    writer->commit();
    return std::string();
  });
  const auto tokens = rendezvous.all_gather("writing the index of " + directory, [&] {
    if (rank != 0) return std::string();
    return std::to_string(formats::join_parts(fs, directory, contents, values, part_options));
  });
  rendezvous.all_gather("marking as complete " + directory, [&] {
    formats::seal_part(fs, directory, rank, std::stoull(tokens.front()), part_options);
    return std::string();
  });
  rendezvous.all_gather("finishing " + directory, [&] {
    if (rank != 0) return std::string();
    finish();
    return std::string();
  });
}

/// Moves the finished checkpoint to its path.
void SaveJob::finish() {
  FileSystem& fs = *options.file_system;
  // The next two variables are destroyed when this call ends, so that errors are reported after the
  // destination is restored.
  const std::unique_ptr<formats::StagedDestination> staging = std::move(staged);
  const std::optional<OneFile> file = std::move(one_file);
  formats::finish_parts(fs, directory, contents, values,
                        {format_of_parts(options.format), options.native});
  if (file) {
    const auto reader = formats::open_checkpoint(fs, directory);
    reshard::execute(file->plan, *reader, *file->writer, {.memory_nbytes = options.memory_nbytes});
    file->writer->commit();
  } else {
    staging->commit();
  }
  if (options.keep_last > 0) remove_older(fs, path, options.keep_last);
}

}  // namespace tessera::state
