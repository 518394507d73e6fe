#include "reshard/file_states.h"

#include "object_store/files.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

FoundFile find_file(const std::string& path) {
  using Kind = object_store::NamedObject::Kind;
  const auto object = object_store::find_target(path);
  if (!object) return {std::nullopt, "not there"};
  const FileKind kind = object->kind == Kind::file     ? FileKind::regular
                        : object->kind == Kind::folder ? FileKind::directory
                                                       : FileKind::other;
  return {kind, object->state};
}

FileStates source_file_states(const formats::CheckpointReader& reader) {
  FileStates states;
  for (const std::string& path : reader.data_files()) states[path] = find_file(path).state;
  return states;
}

}  // namespace tessera::reshard
