#include "reshard/file_states.h"

#include "object_store/files.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

std::string describe_file(const std::string& path) {
  const FileSystem& fs = object_store::files();
  if (!fs.kind_of(path)) return "not there";
  const auto object = object_store::find_name(fs.resolve_links(path));
  return object ? object->state : "not there";
}

FileStates source_file_states(const formats::CheckpointReader& reader) {
  FileStates states;
  for (const std::string& path : reader.data_files()) states[path] = describe_file(path);
  return states;
}

}  // namespace tessera::reshard
