#include "formats/native/h5_calls.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <optional>

#include "tessera/base/error.h"

namespace tessera::formats::native::h5 {
namespace {

constexpr H5Z_filter_t kZstdFilter = 32015;  // registered with The HDF Group

// Allocations of at least this size begin at a multiple of the alignment, so that direct I/O is
// possible.
constexpr hsize_t kAlignThresholdNbytes = 65536;
constexpr hsize_t kAlignmentNbytes = 4096;
// The library gathers small allocations in blocks of these sizes.
constexpr hsize_t kMetadataBlockNbytes = 4096;
constexpr hsize_t kSmallDataBlockNbytes = 4096;

// The library's cache takes many times this size in memory. A larger cache is also slower.
constexpr std::size_t kMetadataCacheNbytes = std::size_t{1} << 20;

/// The mutex that is held during all calls of the library, and while the process forks. If another
/// thread were in the library during a fork, the library's own lock would stay locked in the child
/// process, and the child would hang when it ends.
class LibraryMutex {
 public:
  static std::recursive_mutex& get() {
    static LibraryMutex only;
    return mutex_;
  }

 private:
  LibraryMutex() {
    ::pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); },
                     // The child's thread is not the thread that locked the mutex.
                     [] { new (&mutex_) std::recursive_mutex; });
  }

  static inline std::recursive_mutex mutex_;
};

herr_t keep_description(unsigned /*depth*/, const H5E_error2_t* error, void* out) {
  if (error->desc != nullptr) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

/// Throws the file system's error, if one is pending; otherwise the library's innermost error.
[[noreturn]] void throw_library_error(const std::string& path, const char* call) {
  Channel::rethrow_pending_error();
  std::string reason = "no reason given";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_description, &reason);
  H5Eclear2(H5E_DEFAULT);
  throw Error(ErrorKind::io, {.path = path, .fqn = {}, .byte_range = {}},
              std::string("HDF5: ") + call + ": " + reason);
}

/// Checks the result of a call that returns an id, a status, or a size: negative means failure.
template <class Result>
Result checked(Result result, const std::string& path, const char* call) {
  if (result < 0) throw_library_error(path, call);
  Channel::rethrow_pending_error();  // of a write whose failure is hidden from the library
  return result;
}

Handle make_property_list(hid_t list_class, const std::string& path) {
  return {checked(H5Pcreate(list_class), path, "H5Pcreate"), H5Pclose};
}

Handle make_space(std::span<const std::int64_t> shape, const std::string& path) {
  if (shape.empty()) return {checked(H5Screate(H5S_SCALAR), path, "H5Screate"), H5Sclose};
  const std::vector<hsize_t> sizes(shape.begin(), shape.end());
  return {checked(H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr), path,
                  "H5Screate_simple"),
          H5Sclose};
}

Handle make_text_type(std::size_t nbytes, const std::string& path) {
  Handle type{checked(H5Tcopy(H5T_C_S1), path, "H5Tcopy"), H5Tclose};
  // HDF5 does not allow size 0; an empty text is one NUL.
  checked(H5Tset_size(type.id(), std::max<std::size_t>(nbytes, 1)), path, "H5Tset_size");
  checked(H5Tset_cset(type.id(), H5T_CSET_UTF8), path, "H5Tset_cset");
  checked(H5Tset_strpad(type.id(), H5T_STR_NULLPAD), path, "H5Tset_strpad");
  return type;
}

Handle make_link_properties(const std::string& path) {
  Handle list = make_property_list(H5P_LINK_CREATE, path);
  checked(H5Pset_char_encoding(list.id(), H5T_CSET_UTF8), path, "H5Pset_char_encoding");
  return list;
}

Handle make_dataset_properties(const std::string& path) {
  Handle list = make_property_list(H5P_DATASET_CREATE, path);
  checked(H5Pset_obj_track_times(list.id(), false), path, "H5Pset_obj_track_times");
  return list;
}

// --- element types

Handle make_half_type(const std::string& path) {
  Handle type{checked(H5Tcopy(H5T_IEEE_F32LE), path, "H5Tcopy"), H5Tclose};
  checked(H5Tset_fields(type.id(), 15, 10, 5, 0, 10), path, "H5Tset_fields");
  checked(H5Tset_size(type.id(), 2), path, "H5Tset_size");
  checked(H5Tset_ebias(type.id(), 15), path, "H5Tset_ebias");
  return type;
}

Handle make_complex_type(hid_t number, std::size_t number_nbytes, const std::string& path) {
  Handle type{checked(H5Tcreate(H5T_COMPOUND, 2 * number_nbytes), path, "H5Tcreate"), H5Tclose};
  checked(H5Tinsert(type.id(), "r", 0, number), path, "H5Tinsert");
  checked(H5Tinsert(type.id(), "i", number_nbytes, number), path, "H5Tinsert");
  return type;
}

Handle make_bool_type(const std::string& path) {
  Handle type{checked(H5Tenum_create(H5T_STD_I8LE), path, "H5Tenum_create"), H5Tclose};
  for (const auto& [name, number] : {std::pair{"FALSE", 0}, std::pair{"TRUE", 1}}) {
    const auto value = static_cast<signed char>(number);
    checked(H5Tenum_insert(type.id(), name, &value), path, "H5Tenum_insert");
  }
  return type;
}

Handle copy_type(hid_t type, const std::string& path) {
  return {checked(H5Tcopy(type), path, "H5Tcopy"), H5Tclose};
}

/// Returns the HDF5 type for elements of a dtype. This is the type that h5py reads as this dtype.
/// If HDF5 has no such type, it is an unsigned integer of the same width.
Handle make_element_type(DType dtype, const std::string& path) {
  switch (dtype) {
    case DType::boolean:
      return make_bool_type(path);
    case DType::uint8:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
    case DType::float8_e8m0fnu:
    case DType::float4_e2m1fn_x2:
      return copy_type(H5T_STD_U8LE, path);
    case DType::int8:
      return copy_type(H5T_STD_I8LE, path);
    case DType::uint16:
    case DType::bfloat16:
      return copy_type(H5T_STD_U16LE, path);
    case DType::int16:
      return copy_type(H5T_STD_I16LE, path);
    case DType::uint32:
    case DType::complex32:
      return copy_type(H5T_STD_U32LE, path);
    case DType::int32:
      return copy_type(H5T_STD_I32LE, path);
    case DType::uint64:
      return copy_type(H5T_STD_U64LE, path);
    case DType::int64:
      return copy_type(H5T_STD_I64LE, path);
    case DType::float16:
      return make_half_type(path);
    case DType::float32:
      return copy_type(H5T_IEEE_F32LE, path);
    case DType::float64:
      return copy_type(H5T_IEEE_F64LE, path);
    case DType::complex64:
      return make_complex_type(H5T_IEEE_F32LE, 4, path);
    case DType::complex128:
      return make_complex_type(H5T_IEEE_F64LE, 8, path);
  }
  TESSERA_CHECK(false);
  return {};
}

/// Makes the objects that all datasets share.
SharedObjects make_shared_objects(const std::string& path) {
  SharedObjects shared;
  shared.link_properties = make_link_properties(path);
  shared.dataset_properties = make_dataset_properties(path);
  shared.plain_properties = make_dataset_properties(path);
  const hid_t plain = shared.plain_properties.id();
  checked(H5Pset_alloc_time(plain, H5D_ALLOC_TIME_EARLY), path, "H5Pset_alloc_time");
  checked(H5Pset_fill_time(plain, H5D_FILL_TIME_NEVER), path, "H5Pset_fill_time");
  shared.scalar_space = make_space({}, path);
  shared.number_type = copy_type(H5T_STD_I64LE, path);
  return shared;
}

hid_t text_type(File& file, std::size_t nbytes) {
  Handle& type = file.shared.text_types[nbytes];
  if (!type) type = make_text_type(nbytes, file.path);
  return type.id();
}

hid_t element_type(File& file, DType dtype) {
  Handle& type = file.shared.element_types[dtype];
  if (!type) type = make_element_type(dtype, file.path);
  return type.id();
}

Handle make_dataset(File& file, hid_t parent, const std::string& link_name, hid_t type,
                    const Handle& space, const Handle& properties) {
  return {checked(H5Dcreate2(parent, link_name.c_str(), type, space.id(),
                             file.shared.link_properties.id(), properties.id(), H5P_DEFAULT),
                  file.path, "H5Dcreate2"),
          H5Dclose};
}

void write_attribute_of(const File& file, const Handle& object, const char* name, hid_t type,
                        const Handle& space, const void* data) {
  const Handle attribute{
      checked(H5Acreate2(object.id(), name, type, space.id(), H5P_DEFAULT, H5P_DEFAULT), file.path,
              "H5Acreate2"),
      H5Aclose};
  if (data != nullptr) checked(H5Awrite(attribute.id(), type, data), file.path, "H5Awrite");
}

/// Whether a limit of the process (`ulimit -v`, `ulimit -d`) can make allocations fail.
bool is_memory_limited() {
  rlimit limit{};
  const auto is_set = [&](auto which) {
    return ::getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  };
  return is_set(RLIMIT_AS) || is_set(RLIMIT_DATA);
}

/// If memory is limited, throws std::bad_alloc if the process cannot get what the library may need.
/// One call needs less, but other threads may take memory during the call.
void require_memory() {
  if (!is_memory_limited()) return;  // two system calls for each HDF5 call would cost too much
  constexpr std::size_t kNbytes = std::size_t{32} << 20;
  void* const room =
      ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) throw std::bad_alloc();
  ::munmap(room, kNbytes);
}

}  // namespace

LibraryScope::LibraryScope() : lock_(LibraryMutex::get()) {
  require_memory();
  H5Eget_auto2(H5E_DEFAULT, &report_, &report_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

LibraryScope::~LibraryScope() {
  // Even successful calls leave errors on HDF5's error stack. They must be cleared before the
  // thread ends, or the library cannot close when the process ends.
  H5Eclear2(H5E_DEFAULT);
  H5Eset_auto2(H5E_DEFAULT, report_, report_data_);
}

void Handle::reset() {
  if (id_ < 0) return;
  const hid_t id = std::exchange(id_, H5I_INVALID_HID);
  try {
    const LibraryScope library;
    close_(id);
  } catch (const std::bad_alloc&) {  // closing the object could crash
  }
}

File::~File() {
  if (!handle) return;
  channel->abandon();
  handle.reset();
}

File create_file(FileSystem& fs, const std::string& path, std::uint64_t user_block_nbytes) {
  const LibraryScope library;
  File file;
  file.path = path;
  file.channel = std::make_shared<Channel>(fs, path);
  const Handle access = make_property_list(H5P_FILE_ACCESS, path);
  checked(H5Pset_libver_bounds(access.id(), H5F_LIBVER_V110, H5F_LIBVER_V110), path,
          "H5Pset_libver_bounds");
  checked(H5Pset_alignment(access.id(), kAlignThresholdNbytes, kAlignmentNbytes), path,
          "H5Pset_alignment");
  checked(H5Pset_meta_block_size(access.id(), kMetadataBlockNbytes), path,
          "H5Pset_meta_block_size");
  checked(H5Pset_small_data_block_size(access.id(), kSmallDataBlockNbytes), path,
          "H5Pset_small_data_block_size");
  checked(H5Pset_fclose_degree(access.id(), H5F_CLOSE_STRONG), path, "H5Pset_fclose_degree");
  set_channel(access.id(), file.channel);
  H5AC_cache_config_t cache{};
  cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  checked(H5Pget_mdc_config(access.id(), &cache), path, "H5Pget_mdc_config");
  cache.set_initial_size = true;
  cache.initial_size = kMetadataCacheNbytes;
  cache.min_size = kMetadataCacheNbytes;
  cache.max_size = kMetadataCacheNbytes;
  checked(H5Pset_mdc_config(access.id(), &cache), path, "H5Pset_mdc_config");

  const Handle creation = make_property_list(H5P_FILE_CREATE, path);
  checked(H5Pset_userblock(creation.id(), user_block_nbytes), path, "H5Pset_userblock");
  checked(H5Pset_obj_track_times(creation.id(), false), path, "H5Pset_obj_track_times");
  Channel::forget_pending_error();  // left by an abandoned file
  file.handle = {checked(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.id(), access.id()), path,
                         "H5Fcreate"),
                 H5Fclose};
  file.shared = make_shared_objects(path);
  return file;
}

void close_file(File& file) {
  const LibraryScope library;
  const herr_t status = H5Fclose(file.handle.release());
  // After a failed write, the library may write again when the process ends. Abandon the channel,
  // so that such a write does nothing.
  file.channel->abandon();
  checked(status, file.path, "H5Fclose");
  Channel::rethrow_pending_error();
}

Handle create_group(File& file, const std::string& link_name) {
  const LibraryScope library;
  const Handle properties = make_property_list(H5P_GROUP_CREATE, file.path);
  checked(H5Pset_obj_track_times(properties.id(), false), file.path, "H5Pset_obj_track_times");
  return {checked(H5Gcreate2(file.handle.id(), link_name.c_str(), file.shared.link_properties.id(),
                             properties.id(), H5P_DEFAULT),
                  file.path, "H5Gcreate2"),
          H5Gclose};
}

PlainDataset create_plain_dataset(File& file, hid_t parent, const std::string& link_name,
                                  DType dtype, std::int64_t numel) {
  const LibraryScope library;
  const std::array<std::int64_t, 1> shape = {numel};
  const Handle space = make_space(shape, file.path);
  PlainDataset dataset;
  dataset.handle = make_dataset(file, parent, link_name, element_type(file, dtype), space,
                                file.shared.plain_properties);
  if (numel == 0) return dataset;
  const haddr_t begin = H5Dget_offset(dataset.handle.id());
  if (begin == HADDR_UNDEF) throw_library_error(file.path, "H5Dget_offset");
  dataset.range = {begin, begin + static_cast<std::uint64_t>(numel) * itemsize(dtype)};
  return dataset;
}

Handle create_zstd_dataset(File& file, const std::string& link_name, DType dtype,
                           std::int64_t numel, std::int64_t chunk_numel) {
  const LibraryScope library;
  const std::array<std::int64_t, 1> shape = {numel};
  const Handle space = make_space(shape, file.path);
  const Handle properties = make_dataset_properties(file.path);
  const auto chunk_size = static_cast<hsize_t>(chunk_numel);
  checked(H5Pset_chunk(properties.id(), 1, &chunk_size), file.path, "H5Pset_chunk");
  checked(H5Pset_shuffle(properties.id()), file.path, "H5Pset_shuffle");
  // The filter is optional: the HDF5 library that writes need not have it, because Tessera
  // compresses the chunks itself.
  checked(H5Pset_filter(properties.id(), kZstdFilter, H5Z_FLAG_OPTIONAL, 0, nullptr), file.path,
          "H5Pset_filter");
  checked(H5Pset_fill_time(properties.id(), H5D_FILL_TIME_NEVER), file.path, "H5Pset_fill_time");
  return make_dataset(file, file.handle.id(), link_name, element_type(file, dtype), space,
                      properties);
}

ByteRange place_chunk(File& file, const Handle& dataset, std::int64_t first_element, ChunkForm form,
                      std::span<const std::byte> stored) {
  constexpr std::uint32_t kNoFilterSkipped = 0b00;
  constexpr std::uint32_t kBothFiltersSkipped = 0b11;
  const LibraryScope library;
  const auto offset = static_cast<hsize_t>(first_element);
  file.channel->start_placing();
  const herr_t status = H5Dwrite_chunk(
      dataset.id(), H5P_DEFAULT, form == ChunkForm::raw ? kBothFiltersSkipped : kNoFilterSkipped,
      &offset, stored.size(), stored.data());
  const ByteRange range = file.channel->take_placed();
  checked(status, file.path, "H5Dwrite_chunk");
  TESSERA_CHECK(range.nbytes() == stored.size());
  return range;
}

Handle create_virtual_dataset(File& file, const std::string& link_name, DType dtype,
                              std::span<const std::int64_t> shape,
                              std::span<const VirtualMapping> mappings) {
  const LibraryScope library;
  const Handle space = make_space(shape, file.path);
  const hid_t type = element_type(file, dtype);
  const Handle properties = make_dataset_properties(file.path);
  const auto fill = fill_element(dtype);
  checked(H5Pset_fill_value(properties.id(), type, fill.data()), file.path, "H5Pset_fill_value");
  for (const VirtualMapping& mapping : mappings) {
    const std::array<std::int64_t, 1> source_shape = {mapping.source_numel};
    const Handle source_space = make_space(source_shape, file.path);
    const bool is_all_of_source = mapping.box.numel() == mapping.source_numel;
    if (!shape.empty()) {
      const std::vector<hsize_t> offsets(mapping.box.offsets.begin(), mapping.box.offsets.end());
      const std::vector<hsize_t> sizes(mapping.box.sizes.begin(), mapping.box.sizes.end());
      checked(H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, offsets.data(), nullptr, sizes.data(),
                                  nullptr),
              file.path, "H5Sselect_hyperslab");
    }
    if (!shape.empty() || !is_all_of_source) {
      const auto source_begin = static_cast<hsize_t>(mapping.source_begin);
      const auto numel = static_cast<hsize_t>(mapping.box.numel());
      checked(H5Sselect_hyperslab(source_space.id(), H5S_SELECT_SET, &source_begin, nullptr, &numel,
                                  nullptr),
              file.path, "H5Sselect_hyperslab");
    }
    checked(H5Pset_virtual(properties.id(), space.id(), mapping.source_file.c_str(),
                           virtual_source_name(mapping.source_dataset).c_str(), source_space.id()),
            file.path, "H5Pset_virtual");
  }
  checked(H5Sselect_all(space.id()), file.path, "H5Sselect_all");
  return make_dataset(file, file.handle.id(), link_name, type, space, properties);
}

std::string virtual_source_name(const std::string& name) {
  std::string doubled;
  for (const char c : name) doubled.append(c == '%' ? 2 : 1, c);
  return doubled;
}

std::array<std::byte, 16> fill_element(DType dtype) {
  std::array<std::byte, 16> bytes{};
  const auto put = [&](auto value) {
    const auto raw = std::bit_cast<std::array<std::byte, sizeof value>>(value);
    for (std::size_t at = 0; at < itemsize(dtype); at += sizeof value) {
      std::ranges::copy(raw, bytes.begin() + static_cast<std::ptrdiff_t>(at));
    }
  };
  constexpr std::uint16_t kHalfNaN = 0x7E00;
  switch (dtype) {
    case DType::boolean:
      put(std::uint8_t{1});
      break;
    case DType::int8:
      put(std::numeric_limits<std::int8_t>::max());
      break;
    case DType::int16:
      put(std::numeric_limits<std::int16_t>::max());
      break;
    case DType::int32:
      put(std::numeric_limits<std::int32_t>::max());
      break;
    case DType::int64:
      put(std::numeric_limits<std::int64_t>::max());
      break;
    case DType::float16:
    case DType::complex32:
      put(kHalfNaN);
      break;
    case DType::bfloat16:
      put(std::uint16_t{0x7FC0});
      break;
    case DType::float32:
    case DType::complex64:
      put(std::numeric_limits<float>::quiet_NaN());
      break;
    case DType::float64:
    case DType::complex128:
      put(std::numeric_limits<double>::quiet_NaN());
      break;
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      put(std::uint8_t{0x80});  // the only NaN of the fnuz dtypes
      break;
    case DType::uint8:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::float8_e8m0fnu:
    case DType::float4_e2m1fn_x2:
    case DType::uint16:
    case DType::uint32:
    case DType::uint64:
      bytes.fill(std::byte{0xFF});
      break;
  }
  return bytes;
}

std::string encode_element_type(DType dtype, const std::string& path) {
  constexpr std::size_t kPrefixNbytes = 2;  // H5Tencode adds it; object headers lack it
  const LibraryScope library;
  const Handle type = make_element_type(dtype, path);
  std::size_t nbytes = 0;
  checked(H5Tencode(type.id(), nullptr, &nbytes), path, "H5Tencode");
  std::string bytes(nbytes, '\0');
  checked(H5Tencode(type.id(), bytes.data(), &nbytes), path, "H5Tencode");
  return bytes.substr(kPrefixNbytes);
}

void create_hard_link(File& file, const std::string& existing_name, const std::string& link_name) {
  const LibraryScope library;
  checked(H5Lcreate_hard(file.handle.id(), existing_name.c_str(), file.handle.id(),
                         link_name.c_str(), file.shared.link_properties.id(), H5P_DEFAULT),
          file.path, "H5Lcreate_hard");
}

void write_text_dataset(File& file, hid_t parent, const std::string& link_name,
                        std::string_view text) {
  const LibraryScope library;
  const hid_t type = text_type(file, text.size());
  const Handle dataset = make_dataset(file, parent, link_name, type, file.shared.scalar_space,
                                      file.shared.dataset_properties);
  checked(
      H5Dwrite(dataset.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.empty() ? "" : text.data()),
      file.path, "H5Dwrite");
}

void write_attribute(File& file, const Handle& object, const char* name, std::string_view text) {
  const LibraryScope library;
  write_attribute_of(file, object, name, text_type(file, text.size()), file.shared.scalar_space,
                     text.empty() ? "" : text.data());
}

void write_attribute(File& file, const Handle& object, const char* name,
                     std::span<const std::int64_t> numbers) {
  const LibraryScope library;
  const std::array<std::int64_t, 1> shape = {static_cast<std::int64_t>(numbers.size())};
  const Handle space = make_space(shape, file.path);
  write_attribute_of(file, object, name, file.shared.number_type.id(), space,
                     numbers.empty() ? nullptr : numbers.data());
}

}  // namespace tessera::formats::native::h5
