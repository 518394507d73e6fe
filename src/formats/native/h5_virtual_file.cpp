#include "formats/native/h5_virtual_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "formats/native/h5_encoding.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"

namespace tessera::formats::native::h5 {
namespace {

constexpr std::size_t kBufferNbytes = std::size_t{1} << 20;
constexpr std::uint64_t kSuperblockNbytes = 96;

// Larger global heap collections and tree nodes make the file smaller, but a reader must read a
// whole collection to see one dataset, and a whole node to find one name.
constexpr std::uint64_t kCollectionNbytes = 16384;
constexpr std::uint64_t kMinCollectionNbytes = 4096;  // HDF5 accepts no smaller one
constexpr std::uint64_t kHeapHeaderNbytes = 16;       // of a collection, and of each object in it
constexpr std::size_t kSymbolsPerNode = 64;
constexpr std::size_t kSymbolNbytes = 40;
constexpr std::size_t kChildrenPerNode = 128;
constexpr std::uint64_t kEmptyNameNbytes = 8;  // in a group's heap of names, before all others
constexpr std::size_t kTreeNodeNbytes = 24 + 8 * (kChildrenPerNode + 1) + 8 * kChildrenPerNode;

std::uint64_t round_up_to_8(std::uint64_t number) {
  return (number + 7) / 8 * 8;
}

std::unique_ptr<WritableFile> open_file(FileSystem& fs, const std::string& path) {
  return fs.kind_of(path) ? fs.open_for_update(path) : fs.create(path);
}

/// Returns the bytes that a name takes in a group's heap, where a zero byte ends it.
std::uint64_t heap_nbytes(std::string_view name) {
  return round_up_to_8(name.size() + 1);
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

VirtualFile::VirtualFile(FileSystem& fs, const std::string& path, std::uint64_t user_block_nbytes)
    : user_block_nbytes_(user_block_nbytes),
      file_(open_file(fs, path)),
      end_(user_block_nbytes + kSuperblockNbytes) {}

/// Appends the bytes and zeros up to a multiple of 8. Returns the address of the bytes.
std::uint64_t VirtualFile::append(std::string_view bytes) {
  const std::uint64_t begin = end_;
  buffer_.append(bytes);
  const std::uint64_t nbytes = round_up_to_8(bytes.size());
  buffer_.append(nbytes - bytes.size(), '\0');
  end_ += nbytes;
  if (buffer_.size() >= kBufferNbytes) flush();
  return begin - user_block_nbytes_;
}

/// Appends bytes without padding.
void VirtualFile::append_part(std::string_view bytes) {
  buffer_.append(bytes);
  end_ += bytes.size();
  if (buffer_.size() >= kBufferNbytes) flush();
}

void VirtualFile::flush() {
  if (buffer_.empty()) return;
  file_->write_at(end_ - buffer_.size(), std::as_bytes(std::span(buffer_)));
  buffer_.clear();
}

const std::string& VirtualFile::element_type(DType dtype) {
  std::string& type = element_types_[dtype];
  if (type.empty()) type = encode_element_type(dtype, file_->path());
  return type;
}

/// Puts an object into the global heap. All objects of a collection are written together.
VirtualFile::HeapObject VirtualFile::add_heap_object(std::string_view object) {
  const std::uint64_t nbytes = kHeapHeaderNbytes + round_up_to_8(object.size());
  if (collection_.size() + nbytes > collection_nbytes_) {
    finish_collection();
    flush();  // the collection's bytes come next in the file
    collection_nbytes_ = std::max(kCollectionNbytes, kHeapHeaderNbytes + nbytes);
    collection_begin_ = end_;
    end_ += collection_nbytes_;
    collection_ = "GCOL";
    put(collection_, std::uint32_t{1});  // version, reserved
    put(collection_, collection_nbytes_);
  }
  put(collection_, static_cast<std::uint16_t>(++num_objects_));
  put(collection_, std::uint16_t{0});  // references, which are not counted
  put(collection_, std::uint32_t{0});  // reserved
  put(collection_, std::uint64_t{object.size()});
  collection_.append(object);
  pad_to_8(collection_);
  return {collection_begin_ - user_block_nbytes_, num_objects_};
}

void VirtualFile::finish_collection() {
  if (collection_.empty()) return;
  // Object 0 stands for the bytes that are left.
  const std::uint64_t free_nbytes = collection_nbytes_ - collection_.size();
  if (free_nbytes >= kHeapHeaderNbytes) {
    put(collection_, std::uint64_t{0});
    put(collection_, free_nbytes);
  }
  collection_.resize(collection_nbytes_, '\0');
  file_->write_at(collection_begin_, std::as_bytes(std::span(collection_)));
  collection_.clear();
  collection_nbytes_ = 0;
  num_objects_ = 0;
}

std::uint64_t VirtualFile::add_dataset(std::string_view type, std::span<const std::int64_t> shape,
                                       std::string_view fill, std::string_view layout,
                                       std::span<const TextAttribute> attributes,
                                       std::uint32_t num_links) {
  ObjectHeader header;
  header.add(MessageType::shape, shape_message(shape));
  header.add(MessageType::element_type, type);
  header.add(MessageType::fill, fill);
  header.add(MessageType::layout, layout);
  for (const TextAttribute& attribute : attributes) {
    header.add(MessageType::attribute, text_attribute_message(attribute.name, attribute.text));
  }
  if (num_links > 1) {
    std::string count{'\0'};  // version
    put(count, num_links);
    header.add(MessageType::num_links, count);
  }
  return append(header.finish());
}

std::uint64_t VirtualFile::add_virtual_dataset(DType dtype, std::span<const std::int64_t> shape,
                                               std::span<const VirtualMapping> mappings,
                                               std::span<const TextAttribute> attributes,
                                               std::uint32_t num_links) {
  const auto element = fill_element(dtype);
  const std::string fill = fill_message(as_text(std::span(element).first(itemsize(dtype))));
  std::string layout;
  if (mappings.empty()) {
    const auto numel = static_cast<std::uint64_t>(numel_of(shape));
    layout = contiguous_layout_message(kNoAddress, numel * itemsize(dtype));
  } else {
    const HeapObject object = add_heap_object(mappings_object(shape, mappings));
    layout = virtual_layout_message(object.collection, object.number);
  }
  return add_dataset(element_type(dtype), shape, fill, layout, attributes, num_links);
}

std::uint64_t VirtualFile::add_text_dataset(std::string_view text) {
  const std::uint64_t nbytes = std::max<std::uint64_t>(text.size(), 1);
  const std::uint64_t data = append(text.empty() ? std::string_view("\0", 1) : text);
  return add_dataset(text_type_message(nbytes), {}, fill_message({}),
                     contiguous_layout_message(data, nbytes), {}, 1);
}

std::uint64_t VirtualFile::add_byte_dataset(std::uint64_t nbytes, ByteRange& range,
                                            const std::function<void(const ByteSink&)>& write) {
  range = {end_, end_ + nbytes};
  const std::uint64_t data = nbytes == 0 ? kNoAddress : end_ - user_block_nbytes_;
  write([&](std::span<const std::byte> part) { append_part(as_text(part)); });
  TESSERA_CHECK(end_ == range.end);
  append_part(std::string(round_up_to_8(nbytes) - nbytes, '\0'));
  const std::array<std::int64_t, 1> shape{static_cast<std::int64_t>(nbytes)};
  return add_dataset(element_type(DType::uint8), shape, fill_message({}),
                     contiguous_layout_message(data, nbytes), {}, 1);
}

std::uint64_t VirtualFile::add_group(std::vector<Link> links) {
  return write_group(std::move(links)).header;
}

/// Writes a heap with the names of a group's links, one after the other. Returns its address.
std::uint64_t VirtualFile::write_names(std::span<const Link> links) {
  constexpr std::uint64_t kNothingFree = 1;
  // The empty name is the key before the first one.
  const std::uint64_t data = append(std::string(kEmptyNameNbytes, '\0'));
  std::string name;
  for (const Link& link : links) append(name.assign(link.name).append(1, '\0'));
  const std::uint64_t nbytes = end_ - user_block_nbytes_ - data;
  std::string header = "HEAP";
  put(header, std::uint32_t{0});  // version, reserved
  put(header, nbytes);
  put(header, kNothingFree);
  put(header, data);
  return append(header);
}

/// Writes the nodes with the links, which are sorted by name and whose names `write_names` wrote.
std::vector<VirtualFile::Node> VirtualFile::write_symbols(std::span<const Link> links) {
  std::vector<Node> nodes;
  std::uint64_t last_name = 0;  // the heap offset of the last name; first the empty name
  std::uint64_t next_name = kEmptyNameNbytes;
  for (std::size_t begin = 0; begin < links.size(); begin += kSymbolsPerNode) {
    const std::size_t end = std::min(begin + kSymbolsPerNode, links.size());
    std::string node = "SNOD";
    put(node, std::uint16_t{1});  // version, reserved
    put(node, static_cast<std::uint16_t>(end - begin));
    const std::uint64_t first_key = last_name;
    for (const Link& link : links.subspan(begin, end - begin)) {
      last_name = next_name;
      next_name += heap_nbytes(link.name);
      put(node, last_name);
      put(node, link.address);
      node.append(kSymbolNbytes - 16, '\0');  // nothing is cached
    }
    node.resize(8 + kSymbolsPerNode * kSymbolNbytes, '\0');
    nodes.push_back({append(node), first_key, last_name});
  }
  return nodes;
}

/// Writes one level of a group's tree.
std::vector<VirtualFile::Node> VirtualFile::write_tree_level(std::span<const Node> children,
                                                             std::uint8_t level) {
  std::vector<Node> nodes;
  for (std::size_t begin = 0; begin < children.size(); begin += kChildrenPerNode) {
    const std::size_t end = std::min(begin + kChildrenPerNode, children.size());
    const std::uint64_t address = end_ - user_block_nbytes_;
    std::string node = "TREE";
    node += '\0';  // of a group
    node += static_cast<char>(level);
    put(node, static_cast<std::uint16_t>(end - begin));
    put(node, begin == 0 ? kNoAddress : address - kTreeNodeNbytes);
    put(node, end == children.size() ? kNoAddress : address + kTreeNodeNbytes);
    for (const Node& child : children.subspan(begin, end - begin)) {
      put(node, child.first_key);
      put(node, child.address);
    }
    put(node, children[end - 1].last_key);
    node.resize(kTreeNodeNbytes, '\0');
    nodes.push_back({append(node), children[begin].first_key, children[end - 1].last_key});
  }
  return nodes;
}

VirtualFile::Group VirtualFile::write_group(std::vector<Link> links) {
  std::ranges::sort(links, {}, &Link::name);
  const auto repeated = std::ranges::adjacent_find(links, {}, &Link::name);
  TESSERA_CHECK(!links.empty() && repeated == links.end());
  const std::uint64_t heap = write_names(links);
  std::vector<Node> nodes = write_symbols(links);
  std::uint8_t level = 0;
  do {
    nodes = write_tree_level(nodes, level++);
  } while (nodes.size() > 1);
  Group group{.tree = nodes.front().address, .heap = heap};
  group.header = append(group_header(group.tree, group.heap));
  return group;
}

std::string VirtualFile::superblock(const Group& root) const {
  std::string out("\x89HDF\r\n\x1A\n", 8);
  // Versions of superblock, free space, root group; reserved; version of shared messages; sizes of
  // addresses and lengths; reserved.
  out.append("\0\0\0\0\0\x08\x08\0", 8);
  put(out, static_cast<std::uint16_t>(kSymbolsPerNode / 2));
  put(out, static_cast<std::uint16_t>(kChildrenPerNode / 2));
  put(out, std::uint32_t{0});  // not open for writing
  put(out, user_block_nbytes_);
  put(out, kNoAddress);  // of free space
  put(out, end_);
  put(out, kNoAddress);        // of a driver's information
  put(out, std::uint64_t{0});  // the root group's name
  put(out, root.header);
  put(out, std::uint32_t{1});  // the two addresses that follow are set
  put(out, std::uint32_t{0});  // reserved
  put(out, root.tree);
  put(out, root.heap);
  TESSERA_CHECK(out.size() == kSuperblockNbytes);
  return out;
}

void VirtualFile::close(std::vector<Link> root_links) {
  const Group root = write_group(std::move(root_links));
  finish_collection();
  flush();
  const std::string begin = superblock(root);
  file_->write_at(user_block_nbytes_, std::as_bytes(std::span(begin)));
  file_->resize(end_);
  file_->close();
}

}  // namespace tessera::formats::native::h5
