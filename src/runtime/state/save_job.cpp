#include "runtime/state/save_job.h"

#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/executor.h"

namespace tessera::state {

void SaveJob::run(Rendezvous& rendezvous) {
  FileSystem& fs = FileSystem::posix();
  const int rank = rendezvous.rank();
  const formats::PartOptions part_options{options.format, options.native};
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
    staged->commit();
    if (options.keep_last > 0) {
      formats::keep_last(fs, directory_of(staged->destination()), options.keep_last);
    }
    return std::string();
  });
}

std::string directory_of(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return "/";
  const std::size_t slash = path.rfind('/', end);
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace tessera::state
