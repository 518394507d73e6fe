#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/native/h5_calls.h"

namespace tessera::formats::native::h5 {

// [Note: HDF5 by hand] `VirtualFile` writes an HDF5 file without the library. The functions below
// return its structures, as the HDF5 file format specification (version 3.0) defines them: each as
// a string of its bytes. A *message* is HDF5's name for one record in an object header, not a text
// for people. Numbers are little-endian; addresses and lengths have 8 bytes.

inline constexpr std::uint64_t kNoAddress = UINT64_MAX;

/// Appends a little-endian number.
template <class T>
void put(std::string& out, T number) {
  char raw[sizeof number];
  std::memcpy(raw, &number, sizeof number);
  out.append(raw, sizeof number);
}

/// Appends zeros until the size is a multiple of 8 bytes.
void pad_to_8(std::string& out);

/// Returns HDF5's checksum of metadata, Bob Jenkins' `lookup3`.
std::uint32_t lookup3(std::string_view bytes);

/// Returns the bytes of HDF5's datatype message (type 3) for a text of `nbytes` bytes.
std::string text_type_message(std::size_t nbytes);

/// Returns the bytes of HDF5's dataspace message (type 1), which holds the shape of a dataset or an
/// attribute.
std::string shape_message(std::span<const std::int64_t> shape);

/// Returns the bytes of HDF5's fill value message (type 5) of a dataset. If `element` is empty:
/// HDF5's default value.
std::string fill_message(std::string_view element);

/// Returns the bytes of HDF5's data layout message (type 8) for a dataset whose data is one range
/// of the file. `kNoAddress`: no data is stored, and HDF5 shows the fill value.
std::string contiguous_layout_message(std::uint64_t address, std::uint64_t nbytes);

/// Returns the bytes of HDF5's data layout message (type 8) for a virtual dataset: where in the
/// global heap its mappings are.
std::string virtual_layout_message(std::uint64_t collection_address, std::uint32_t number);

/// Returns the bytes of HDF5's attribute message (type 12) for an attribute that holds one text.
std::string text_attribute_message(std::string_view name, std::string_view text);

/// The types of HDF5's messages that are used here, with their numbers in the specification.
enum class MessageType : std::uint8_t {
  shape = 0x01,
  element_type = 0x03,
  fill = 0x05,
  layout = 0x08,
  attribute = 0x0C,
  symbol_table = 0x11,
  num_links = 0x16,
};

/// Builds the object header of a dataset.
class ObjectHeader {
 public:
  void add(MessageType type, std::string_view content);
  /// Returns the bytes of the header, with its checksum.
  std::string finish() const;

 private:
  std::string messages_;
};

/// Returns the object header of a group whose links are in a symbol table.
std::string group_header(std::uint64_t tree_address, std::uint64_t heap_address);

/// Returns the mappings of a virtual dataset of `shape`, as an object of the global heap.
std::string mappings_object(std::span<const std::int64_t> shape,
                            std::span<const VirtualMapping> mappings);

}  // namespace tessera::formats::native::h5
