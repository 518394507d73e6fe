#include "bind_reader.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/checkpoint_identity.h"
#include "formats/key_order.h"
#include "inspect/element.h"
#include "move_request.h"
#include "object_store/files.h"
#include "python_value.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/detect.h"
#include "tessera/inspect/tensor_reader.h"
#include "tessera/reshard/executor.h"
#include "watched_work.h"

namespace tessera::python {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;

/// The bytes that one thread reads in one step.
constexpr std::int64_t kWindowNbytes = std::int64_t{16} << 20;
/// Reads of at least this size can be interrupted by Ctrl-C. Reads from URLs always can.
constexpr std::size_t kWatchedNbytes = std::size_t{64} << 20;

/// Writable memory of a numpy array, a torch tensor or a bytearray.
using Buffer = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<std::byte> bytes_of(const Buffer& buffer) {
  return std::as_writable_bytes(std::span(buffer.data(), buffer.size()));
}

/// One tensor of a checkpoint. Keeps the checkpoint open. Immutable.
class TensorSource {
 public:
  TensorSource(std::shared_ptr<const reshard::SourceFiles> files,
               std::shared_ptr<const CheckpointReader> reader, std::size_t tensor_index)
      : files_(std::move(files)), reader_(std::move(reader)), tensor_(*reader_, tensor_index) {}

  /// Fills `buffer`, which must have the size of the box, with the box in its row-major order.
  void read(const std::vector<std::int64_t>& offsets, const std::vector<std::int64_t>& sizes,
            const Buffer& buffer) const {
    const Box box{offsets, sizes};
    const std::span<std::byte> out = bytes_of(buffer);
    if (out.size() < kWatchedNbytes) {
      run_short_read(reader_->path(), [&] { read_windows(box, out, {}); });
    } else {
      run_watched(nb::none(), [&](Watch& watch) { read_windows(box, out, watch.token()); });
    }
  }

 private:
  void read_windows(const Box& box, std::span<std::byte> out, const std::stop_token& stop) const {
    const auto size = static_cast<std::int64_t>(itemsize(tensor_.meta().dtype));
    const std::int64_t window_numel = kWindowNbytes / size;
    const std::int64_t numel = box.numel();
    TESSERA_CHECK(numel >= 0 && std::cmp_equal(out.size(), numel * size));
    parallel_for((numel + window_numel - 1) / window_numel, object_store::default_num_threads(),
                 stop, [&](std::int64_t i) {
                   const std::int64_t begin = i * window_numel;
                   const std::int64_t end = std::min(numel, begin + window_numel);
                   tensor_.read(box, {begin, end},
                                out.subspan(static_cast<std::size_t>(begin * size),
                                            static_cast<std::size_t>((end - begin) * size)));
                 });
  }

  std::shared_ptr<const reshard::SourceFiles> files_;
  std::shared_ptr<const CheckpointReader> reader_;
  inspect::TensorReader tensor_;
};

/// An open checkpoint. Immutable.
class Reader {
 public:
  Reader(const std::string& path, const formats::OpenOptions& options,
         const std::string& recipe_path, bool inverse, const std::vector<std::string>& settings) {
    run_interruptibly([&] {
      object_store::forget(path);
      auto opened = formats::open_checkpoint(files_->file_system(), path, options);
      formats::require_classes_found(options.as_dict, {&opened->contents()}, "as_dict");
      if (const auto recipe = read_recipe(recipe_path, inverse, settings, {path})) {
        opened = recipe::open_transformed(std::move(opened), recipe->recipe, recipe->options);
      }
      reader_ = std::move(opened);
    });
  }

  std::string_view format() const { return reader_->format().name(); }
  int world_size() const { return contents().world_size; }

  nb::list tensors() const {
    nb::list list;
    for (const formats::TensorEntry& tensor : contents().tensors) {
      nb::list shape;
      for (const std::int64_t size : tensor.meta.shape) shape.append(size);
      list.append(nb::make_tuple(text_to_python(tensor.meta.fqn),
                                 text_to_python(dtype_name(tensor.meta.dtype)),
                                 itemsize(tensor.meta.dtype), nb::tuple(shape)));
    }
    return list;
  }
  nb::list values() const {
    nb::list list;
    for (const formats::ValueEntry& value : contents().values) {
      list.append(text_to_python(value.name));
    }
    return list;
  }
  nb::list aliases() const {
    nb::list list;
    for (const formats::Alias& alias : contents().aliases) {
      list.append(nb::make_tuple(text_to_python(alias.fqn), text_to_python(alias.target)));
    }
    return list;
  }

  /// Returns the names of all tensors, values and aliases in the order of the state dict.
  nb::list dict_order() const {
    const formats::CheckpointContents& all = contents();
    const std::size_t num_tensors = all.tensors.size();
    nb::list list;
    for (const std::uint32_t number : formats::entries_in_dict_order(all)) {
      const std::string& name = number < num_tensors ? all.tensors[number].meta.fqn
                                : number < num_tensors + all.aliases.size()
                                    ? all.aliases[number - num_tensors].fqn
                                    : all.values[number - num_tensors - all.aliases.size()].name;
      list.append(text_to_python(name));
    }
    return list;
  }

  /// Returns the keys of each tensor, value and alias, in this order.
  nb::list paths() const {
    nb::list list;
    for (const formats::TensorEntry& tensor : contents().tensors) {
      list.append(path_to_python(tensor.key_path, tensor.meta.fqn));
    }
    for (const formats::ValueEntry& value : contents().values) {
      list.append(path_to_python(value.key_path, value.name));
    }
    for (const formats::Alias& alias : contents().aliases) {
      list.append(path_to_python(alias.key_path, alias.fqn));
    }
    return list;
  }

  nb::list opened_classes() const {
    nb::list list;
    for (const formats::OpenedClass& opened : contents().opened_classes) {
      list.append(nb::make_tuple(text_to_python(opened.name), opened.num_objects));
    }
    return list;
  }

  std::optional<std::string> part() const {
    const std::optional<formats::PartOfWhole>& part = contents().part;
    return part ? std::optional(part_in_words(*part)) : std::nullopt;
  }

  TensorSource tensor(std::size_t tensor_index) const {
    const nb::gil_scoped_release without_gil;
    return TensorSource(files_, reader_, tensor_index);
  }

  /// Throws if a file that has been opened was changed or replaced since.
  void require_unchanged() const {
    run_short_read(reader_->path(), [&] { files_->require_unchanged(); });
  }

  /// Returns a digest by which ranks check that they read the same checkpoint, or copies of it.
  std::string identity() const {
    std::string digest;
    run_interruptibly(
        [&] { digest = formats::identity_of(*reader_, [](const std::string&) { return true; }); });
    return digest;
  }

  nb::object read_value(std::size_t value_index) const {
    return value_to_python(value_at(value_index));
  }

  nb::object nearest_name(const std::string& name) const {
    std::vector<std::string_view> names;
    for (const auto& tensor : contents().tensors) names.push_back(tensor.meta.fqn);
    for (const auto& value : contents().values) names.push_back(value.name);
    for (const auto& alias : contents().aliases) names.push_back(alias.fqn);
    const auto nearest = closest_word(name, names);
    return nearest ? text_to_python(*nearest) : nb::none();
  }

 private:
  const CheckpointContents& contents() const { return reader_->contents(); }

  Value value_at(std::size_t value_index) const {
    Value value;
    run_short_read(reader_->path(), [&] { value = reader_->read_value(value_index); });
    return value;
  }

  // Shared with the tensors, which may live longer than this object.
  std::shared_ptr<const reshard::SourceFiles> files_ =
      std::make_shared<const reshard::SourceFiles>();
  std::shared_ptr<const CheckpointReader> reader_;
};

void to_float32(const std::string& dtype, const Buffer& bytes,
                const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
  const auto parsed = parse_dtype(dtype);
  TESSERA_CHECK(parsed && inspect::fits_float32(*parsed) &&
                out.size() == bytes.size() / itemsize(*parsed));
  const nb::gil_scoped_release without_gil;
  inspect::to_floats(*parsed, bytes_of(bytes), {out.data(), out.size()});
}

}  // namespace

void bind_reader(nb::module_& module) {
  nb::class_<TensorSource>(module, "TensorSource")
      .def("read", &TensorSource::read, nb::arg("offsets"), nb::arg("sizes"), nb::arg("buffer"));
  nb::class_<Reader>(module, "Reader")
      .def(
          "__init__",
          [](Reader* self, const nb::bytes& path, const nb::bytes& flat_layout,
             const std::vector<nb::bytes>& as_dict, const nb::bytes& recipe, bool inverse,
             const std::vector<nb::bytes>& settings) {
            new (self)
                Reader(string_of(path),
                       {.flat_layout_path = string_of(flat_layout), .as_dict = strings_of(as_dict)},
                       string_of(recipe), inverse, strings_of(settings));
          },
          nb::arg("path"), nb::arg("flat_layout"), nb::arg("as_dict"), nb::arg("recipe"),
          nb::arg("inverse"), nb::arg("set"))
      .def_prop_ro("format", &Reader::format)
      .def_prop_ro("world_size", &Reader::world_size)
      .def("tensors", &Reader::tensors)
      .def("values", &Reader::values)
      .def("aliases", &Reader::aliases)
      .def("dict_order", &Reader::dict_order)
      .def("paths", &Reader::paths)
      .def("opened_classes", &Reader::opened_classes)
      .def("part", &Reader::part)
      .def("tensor", &Reader::tensor, nb::arg("tensor_index"))
      .def("require_unchanged", &Reader::require_unchanged)
      .def("identity", &Reader::identity)
      .def("read_value", &Reader::read_value, nb::arg("value_index"))
      .def(
          "nearest_name",
          [](const Reader& self, const nb::bytes& name) {
            return self.nearest_name(string_of(name));
          },
          nb::arg("name"));
  module.def("to_float32", &to_float32, nb::arg("dtype"), nb::arg("bytes"), nb::arg("out"));
}

}  // namespace tessera::python
