#include "reshard/file_states.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include "object_store/files.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

/// Whether the file system of `path` makes inode numbers up and forgets them. Then another number
/// does not mean that somebody has replaced the file.
bool may_renumber_inodes(const std::string& path) {
  struct statfs system {};
  if (::statfs(path.c_str(), &system) != 0) return true;
  const auto type = static_cast<std::uint32_t>(system.f_type);
  return type == FUSE_SUPER_MAGIC || type == V9FS_MAGIC || type == CIFS_SUPER_MAGIC ||
         type == SMB2_SUPER_MAGIC || type == MSDOS_SUPER_MAGIC || type == EXFAT_SUPER_MAGIC;
}

}  // namespace

FoundFile find_file(const std::string& path) {
  using Kind = object_store::NamedObject::Kind;
  const auto object = object_store::find_target(path);
  if (!object) return {std::nullopt, {"not there"}};
  const FileKind kind = object->kind == Kind::file     ? FileKind::regular
                        : object->kind == Kind::folder ? FileKind::directory
                                                       : FileKind::other;
  return {kind, {object->state, object->inode}};
}

bool is_same_state(const std::string& path, const FileState& before, const FileState& now) {
  if (before.words != now.words) return false;
  return before.inode == now.inode || may_renumber_inodes(path);
}

std::string change_in_words(const FileState& before, const FileState& state) {
  return state.words == before.words ? "another file of the same size and time" : state.words;
}

FileStates source_file_states(const formats::CheckpointReader& reader) {
  FileStates states;
  for (const std::string& path : reader.data_files()) states[path] = find_file(path).state;
  return states;
}

}  // namespace tessera::reshard
