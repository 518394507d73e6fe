#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// The rank files and linked files of an open checkpoint. A file is opened when it is first needed.
/// It may be closed, and opened again later, if many files are open (open_kept). Thread-safe.
class RankFiles {
 public:
  /// `index` must outlive this object.
  RankFiles(const FileSystem& fs, std::string checkpoint_path, std::uint64_t checkpoint_id,
            const Index& index);

  /// Returns the open file that holds a piece of `rank` with the place `stored`, after checking
  /// that it is the file that the index names. Throws: Error(corruption) if it is missing, of
  /// another checkpoint, or of another size.
  const ReadableFile& open(std::int64_t rank, const StoredPiece& stored) const;

 private:
  const FileSystem& fs_;
  std::string checkpoint_path_;
  std::uint64_t checkpoint_id_;
  const Index& index_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const ReadableFile>>
      files_;  // indexed by rank, then linked files
};

/// Returns the name of the file that holds a piece of `rank` with the place `stored`.
std::string file_name_of(const Index& index, std::int64_t rank, const StoredPiece& stored);

/// Opens the rank's file. Throws: Error(corruption) if it is missing, or its header is not the one
/// that `records[rank]` describes. `records`: the checkpoint's rank files, by rank.
std::unique_ptr<ReadableFile> open_rank_file(const FileSystem& fs,
                                             const std::string& checkpoint_path, std::int64_t rank,
                                             std::uint64_t checkpoint_id,
                                             const std::vector<RankFileRecord>& records);

/// Opens a linked file. Throws: Error(corruption) if it is missing, or has another header.
std::unique_ptr<ReadableFile> open_linked_file(const FileSystem& fs,
                                               const std::string& checkpoint_path,
                                               const LinkedFile& file);

/// The header and the index of a rank file.
struct RankFileIndex {
  FileHeader header;
  Index index;

  RankFileRecord record() const {
    return {header.file_nbytes, header.index_checksum, header.structure_checksum};
  }
};

/// Reads the header and the index of the rank's file in a checkpoint of `world_size` ranks.
RankFileIndex read_rank_file_index(const FileSystem& fs, const std::string& checkpoint_path,
                                   std::int64_t rank, std::int64_t world_size);

/// Reads the header and the index of a linked file.
RankFileIndex read_linked_file_index(const FileSystem& fs, const std::string& checkpoint_path,
                                     const LinkedFile& file);

/// If ranks have no file, throws Error(corruption) that lists these ranks, with `likely_cause`.
void require_rank_files(const FileSystem& fs, const std::string& checkpoint_path,
                        std::int64_t world_size, std::string_view likely_cause);

}  // namespace tessera::formats::native
