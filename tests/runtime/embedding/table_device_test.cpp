#include "runtime/embedding/table_device.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(TableDeviceTest, ADeviceWithTooLittleMemoryIsNamedWithTableAndBytes) {
  const std::string message = test::error_of([] {
    embedding::allocate_on(at::Device(at::kCUDA, 1), {.table = "users", .nbytes = 4096}, [] {
      throw c10::OutOfMemoryError(c10::SourceLocation{"", "", 0}, "CUDA out of memory");
    });
  });
  EXPECT_THAT(message,
              HasSubstr("users: memory for a table and its optimizer state: expected "
                        "4096 bytes on cuda:1, found not enough free memory (shard the table over "
                        "more ranks"));
}

/// Tables of which the second to last is on another device.
class TablesOnTwoDevices final : public EmbeddingBagCollectionBase {
 public:
  TablesOnTwoDevices() : EmbeddingBagCollectionBase(TableSet(test::small_tables(), {})) {
    for (const EmbeddingBagConfig& config : tables().configs()) {
      const at::Device its_device = config.name == "days" ? at::kMeta : at::kCPU;
      register_weight(config.name, torch::empty({config.num_embeddings, config.embedding_dim},
                                                at::TensorOptions(its_device)));
    }
  }
  KeyedTensor forward(const KeyedJaggedTensor& /*batch*/) override { return {{}, {}, {}}; }
};

TEST(TableDeviceTest, TablesOnSeveralDevicesAreRefusedUnlessOneIsChosen) {
  const TablesOnTwoDevices collection;
  EXPECT_THAT(
      test::error_of(
          [&] { embedding::device_for_tables(collection, dist::Mesh(), ShardOptions{}); }),
      HasSubstr("days: device of the tables of a collection: expected cpu, as of table users, "
                "found meta"));
  ShardOptions chosen;
  chosen.device = at::kCPU;
  EXPECT_EQ(embedding::device_for_tables(collection, dist::Mesh(), chosen), at::Device(at::kCPU));
}

}  // namespace
}  // namespace tessera
