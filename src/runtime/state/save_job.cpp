#include "runtime/state/save_job.h"

#include "runtime/state/load_problems.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/executor.h"

namespace tessera::state {

formats::Format format_of_parts(formats::Format format) {
  return formats::holds_whole_tensors(format) ? formats::Format::native : format;
}

void SaveJob::start_one_file(const std::string& path) {
  OneFile file;
  file.plan = reshard::plan_reshard(contents, path, {.format = options.format});
  refuse_problems(path, file.plan.problems);
  std::vector<Value> moved;
  for (const std::size_t i : file.plan.value_sources) moved.push_back(values[i]);
  file.writer =
      formats::create_checkpoint(FileSystem::posix(), path, file.plan.destination, std::move(moved),
                                 {.format = options.format, .overwrite = options.overwrite});
  one_file = std::move(file);
}

void SaveJob::run(Rendezvous& rendezvous) {
  FileSystem& fs = FileSystem::posix();
  const int rank = rendezvous.rank();
  const formats::PartOptions part_options{format_of_parts(options.format), options.native};
  rendezvous.together("writing " + directory, [&] {
    const auto writer = formats::create_part(fs, directory, contents, values, rank, part_options);
    const LiveReader reader(held_contents(*live, rank), std::move(held));
    reshard::execute(*plan, reader, *writer, {.memory_nbytes = options.memory_nbytes});
    writer->commit();
    return std::string();
  });
  const auto tokens = rendezvous.together("joining " + directory, [&] {
    if (rank != 0) return std::string();
    return std::to_string(formats::join_parts(fs, directory, contents, values, part_options));
  });
  rendezvous.together("sealing " + directory, [&] {
    formats::seal_part(fs, directory, rank, std::stoull(tokens.front()), part_options);
    return std::string();
  });
  rendezvous.together("finishing " + directory, [&] {
    if (rank != 0) return std::string();
    formats::finish_parts(fs, directory, contents, values, part_options);
    finish();
    return std::string();
  });
}

/// Makes the checkpoint appear.
void SaveJob::finish() {
  FileSystem& fs = FileSystem::posix();
  const std::string in = directory_of(staged->destination());
  if (one_file) {
    const auto parts = formats::open_checkpoint(fs, directory);
    reshard::execute(one_file->plan, *parts, *one_file->writer,
                     {.memory_nbytes = options.memory_nbytes});
    one_file->writer->commit();
    staged.reset();
  } else {
    staged->commit();
  }
  if (options.keep_last > 0) formats::keep_last(fs, in, options.keep_last);
}

std::string directory_of(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return "/";
  const std::size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace tessera::state
