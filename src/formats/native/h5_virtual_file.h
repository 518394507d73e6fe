#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/native/h5_calls.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::native::h5 {

/// An HDF5 file of many virtual datasets, written without the HDF5 library, because the library
/// takes 100 microseconds for each dataset ([Note: HDF5 by hand]). Writes objects in the order
/// of the calls, and links at the end, so it keeps only the links in memory. Not thread-safe.
class VirtualFile {
 public:
  /// Creates the file. If there is a file at `path`, writes over it.
  VirtualFile(FileSystem& fs, const std::string& path, std::uint64_t user_block_nbytes);

  /// A name of an object in a group. Keeps a view of the name.
  struct Link {
    std::string_view name;
    std::uint64_t address;  // from the end of the user block
  };
  struct TextAttribute {
    std::string_view name;
    std::string_view text;
  };

  // Each of the functions below writes an object, and returns its address.

  /// A dataset of `shape` that shows `mappings`, as `create_virtual_dataset` makes it.
  /// `num_links` is the number of links that will lead to it.
  std::uint64_t add_virtual_dataset(DType dtype, std::span<const std::int64_t> shape,
                                    std::span<const VirtualMapping> mappings,
                                    std::span<const TextAttribute> attributes,
                                    std::uint32_t num_links);
  std::uint64_t add_text_dataset(std::string_view text);
  /// Appends the next bytes of a dataset.
  using ByteSink = std::function<void(std::span<const std::byte>)>;
  /// A dataset of `nbytes` bytes, which `write` passes to its sink in parts. Sets `range` to their
  /// place in the file.
  std::uint64_t add_byte_dataset(std::uint64_t nbytes, ByteRange& range,
                                 const std::function<void(const ByteSink&)>& write);
  /// A group with these links: at least one, with different names.
  std::uint64_t add_group(std::vector<Link> links);

  /// Writes the root group and all that is still in memory, and closes the file without sync.
  void close(std::vector<Link> root_links);

 private:
  /// The addresses of a group. The superblock stores those of the root group.
  struct Group {
    std::uint64_t header = 0;
    std::uint64_t tree = 0;
    std::uint64_t heap = 0;
  };
  struct HeapObject {
    std::uint64_t collection = 0;
    std::uint32_t number = 0;
  };
  /// A node of a symbol table's tree. `first_key`: the heap offset of the last name before the
  /// node. `last_key`: the heap offset of the node's last name.
  struct Node {
    std::uint64_t address = 0;
    std::uint64_t first_key = 0;
    std::uint64_t last_key = 0;
  };

  std::uint64_t append(std::string_view bytes);
  void append_part(std::string_view bytes);
  void flush();
  const std::string& element_type(DType dtype);
  HeapObject add_heap_object(std::string_view object);
  void finish_collection();
  std::uint64_t add_dataset(std::string_view type, std::span<const std::int64_t> shape,
                            std::string_view fill, std::string_view layout,
                            std::span<const TextAttribute> attributes, std::uint32_t num_links);
  Group write_group(std::vector<Link> links);
  std::uint64_t write_names(std::span<const Link> links);
  std::vector<Node> write_symbols(std::span<const Link> links);
  std::vector<Node> write_tree_level(std::span<const Node> children, std::uint8_t level);
  std::string superblock(const Group& root) const;

  const std::uint64_t user_block_nbytes_;
  std::unique_ptr<WritableFile> file_;
  std::uint64_t end_;   // of the file, including `buffer_`
  std::string buffer_;  // the last bytes of the file
  // The part of the global heap that is being filled. In the file, it is before `buffer_`.
  std::uint64_t collection_begin_ = 0;
  std::uint64_t collection_nbytes_ = 0;
  std::string collection_;
  std::uint32_t num_objects_ = 0;  // in the collection
  std::map<DType, std::string> element_types_;
};

}  // namespace tessera::formats::native::h5
