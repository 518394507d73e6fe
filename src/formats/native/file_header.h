#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native {

/// The kind of a file in a checkpoint. Stored on disk; never renumber.
enum class FileRole : std::uint32_t { index = 1, rank = 2 };

/// Format versions. All files of a checkpoint have the same one, but linked files keep their own.
inline constexpr std::uint32_t kFirstVersion = 1;
inline constexpr std::uint32_t kPackedVersion = 2;   // [Note: Packed pieces]
inline constexpr std::uint32_t kLinkedVersion = 3;   // [Note: Linked files]
inline constexpr std::uint32_t kPatchedVersion = 4;  // [Note: Patched pieces]
inline constexpr std::uint32_t kNewestVersion = kPatchedVersion;

/// The first bytes of each file, in what HDF5 calls the user block.
///
///      0    8  magic
///      8    4  format version          24    8  checkpoint id
///     12    4  role                    32   16  index range
///     16    4  rank                    48    8  index checksum
///     20    4  world size              56    8  structure checksum
///     64    8  file nbytes             72 4016  zero
///   4088    8  checksum of the 4088 bytes before
///
/// `structure_checksum` below says what that checksum covers. See docs/formats/native.md.
struct FileHeader {
  std::uint32_t version = kFirstVersion;
  FileRole role = FileRole::index;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 0;
  std::uint64_t checkpoint_id = 0;
  ByteRange index_range;
  std::uint64_t index_checksum = 0;
  std::uint64_t structure_checksum = 0;
  std::uint64_t file_nbytes = 0;
};

inline constexpr std::array<unsigned char, 8> kMagic = {0x89, 'T',  'S',  'R',
                                                        '\r', '\n', 0x1A, '\n'};
inline constexpr std::size_t kHeaderFieldsNbytes = 8 + 4 * 4 + 8 + 16 + 8 + 8 + 8;
inline constexpr std::size_t kHeaderNbytes = 4096;
static_assert(kHeaderFieldsNbytes == 72 && kHeaderFieldsNbytes + 4016 + 8 == kHeaderNbytes);

/// The checkpoint id in a rank file that is not sealed yet ([Note: Rank parts] in parts.h).
inline constexpr std::uint64_t kUnsealedId = 0;

inline constexpr std::uint64_t kMaxIndexNbytes = std::uint64_t{512} << 20;
inline constexpr std::uint32_t kMaxWorldSize = 1'000'000;  // the same as in strategy.h

/// Names of the files in a checkpoint.
inline constexpr const char* kIndexFileName = "index.h5";
std::string rank_file_name(std::int64_t rank);  // `rank-00003.h5`
/// `base-0123456789abcdef-00003.h5`; the checkpoint id and the rank are those in the file's header.
std::string linked_file_name(std::uint64_t checkpoint_id, std::int64_t rank);

std::array<std::byte, kHeaderNbytes> encode_header(const FileHeader& header);

/// Reads the header and checks its fields against each other and the size of the file.
/// Throws: Error(unsupported) if the file is not a file of Tessera, or has a later format version;
/// Error(corruption) if it is damaged.
FileHeader read_header(const ReadableFile& file);

/// Throws Error(unsupported): an index of this size cannot be read.
[[noreturn]] void refuse_index_size(const std::string& path, std::uint64_t nbytes);

/// Throws Error(corruption) unless this is the header of an index file.
void require_index_role(const FileHeader& header, const std::string& path);

/// Throws Error(corruption) unless this is the header of the file of `rank` in a checkpoint of
/// `world_size` ranks.
void require_rank_role(const FileHeader& header, const std::string& path, std::int64_t rank,
                       std::int64_t world_size);

/// Returns the encoded index that the header points to. Throws: Error(corruption) if damaged.
std::vector<std::byte> read_index_bytes(const ReadableFile& file, const FileHeader& header);

/// Returns the checksum of the bytes after the header, except those in `data_ranges`.
/// Requires: the ranges are sorted and disjoint, after the header and within the file.
std::uint64_t structure_checksum(const ReadableFile& file, std::span<const ByteRange> data_ranges);

}  // namespace tessera::formats::native
