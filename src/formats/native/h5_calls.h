#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/native/h5_file_driver.h"
#include "formats/native/h5_handle.h"
#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"
#include "tessera/layout/region.h"

namespace tessera::formats::native::h5 {

// All calls of the HDF5 library are in these functions and in h5_file_driver.cpp. Each function
// here holds the library's mutex. If a call fails, it throws the file system's exception, if there
// is one; otherwise Error(io) with the path and the library's innermost reason.

/// HDF5 objects (types, property lists) that every dataset and attribute of a file needs. All share
/// them, because making them each time would be costly.
struct SharedObjects {
  Handle link_properties{};
  Handle dataset_properties{};
  Handle plain_properties{};
  Handle scalar_space{};
  Handle number_type{};                        // type of numbers in attributes
  std::map<std::size_t, Handle> text_types{};  // key: length in bytes
  std::map<DType, Handle> element_types{};
};

/// An HDF5 file that is being written. If the File is destroyed before `close_file`, the data that
/// the library has not written yet is lost.
struct File {
  std::string path;
  std::shared_ptr<Channel> channel;
  Handle handle;
  SharedObjects shared;

  File() = default;
  ~File();
  File(File&&) = default;
  File& operator=(File&&) = default;

  /// The file itself, for writes that bypass the library.
  WritableFile& bytes() { return channel->file(); }
};

/// Creates a file whose bytes depend only on its content: no times, fixed versions of all
/// structures. If there is a file at `path`, writes over it, without truncating it first.
File create_file(FileSystem& fs, const std::string& path, std::uint64_t user_block_nbytes);

/// Writes the data that the library still holds, and closes the file in the library. The file
/// itself (`File::bytes`) stays open.
void close_file(File& file);

/// Creates a group at the root of the file.
Handle create_group(File& file, const std::string& link_name);

/// A one-dimensional dataset that is one range of the file. `create_plain_dataset` allocates the
/// range but does not fill it. An empty dataset has the range `[0, 0)`.
struct PlainDataset {
  Handle handle;
  ByteRange range;
};
PlainDataset create_plain_dataset(File& file, hid_t parent, const std::string& link_name,
                                  DType dtype, std::int64_t numel);

/// Creates a one-dimensional dataset of chunks that are byte-shuffled and zstd-compressed.
Handle create_zstd_dataset(File& file, const std::string& link_name, DType dtype,
                           std::int64_t numel, std::int64_t chunk_numel);

enum class ChunkForm { filtered, raw };  // raw: neither shuffled nor compressed

/// Lets the library choose where in the file a chunk with the bytes `stored` goes, and returns that
/// range. Writes nothing there: the caller writes the bytes.
ByteRange place_chunk(File& file, const Handle& dataset, std::int64_t first_element, ChunkForm form,
                      std::span<const std::byte> stored);

/// A box of a virtual dataset, and the range of a source dataset that HDF5 shows in this box.
struct VirtualMapping {
  Box box;
  std::string source_file;     // relative to the file of the virtual dataset
  std::string source_dataset;  // link name, one-dimensional
  std::int64_t source_numel = 0;
  std::int64_t source_begin = 0;  // first element of the box in the source
};

/// Creates a dataset of `shape` that shows `mappings`. Elements without a mapping, or whose file is
/// missing, read as NaN, or as the greatest value if the dtype has no NaN.
Handle create_virtual_dataset(File& file, const std::string& link_name, DType dtype,
                              std::span<const std::int64_t> shape,
                              std::span<const VirtualMapping> mappings);

/// Returns a name for a virtual dataset's mapping, with each `%` doubled. HDF5 reads a single `%`
/// as the start of a block number.
std::string virtual_source_name(const std::string& name);

/// Returns an element that stands for missing data: a NaN, or the greatest value if the dtype has
/// no NaN. The element is the first `itemsize(dtype)` bytes of the array.
std::array<std::byte, 16> fill_element(DType dtype);

/// Returns the bytes of HDF5's datatype message for `dtype`: what H5Tencode gives, without its
/// 2-byte prefix. `path`: for error messages.
std::string encode_element_type(DType dtype, const std::string& path);

/// Gives an object of the file a second name, which HDF5 calls a hard link.
void create_hard_link(File& file, const std::string& existing_name, const std::string& link_name);

/// Creates a scalar dataset with one UTF-8 text.
void write_text_dataset(File& file, hid_t parent, const std::string& link_name,
                        std::string_view text);

void write_attribute(File& file, const Handle& object, const char* name, std::string_view text);
void write_attribute(File& file, const Handle& object, const char* name,
                     std::span<const std::int64_t> numbers);

}  // namespace tessera::formats::native::h5
