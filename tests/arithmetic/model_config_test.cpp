#include "arithmetic/model_config.h"

#include <gtest/gtest.h>

#include "support/memory_files.h"

namespace tessera::arithmetic {
namespace {

TEST(ModelConfigTest, ModelOptMayDescribeTheWeightsInAFileOfItsOwn) {
  test::MemoryFiles files("model", {{"model.safetensors", ""}});
  EXPECT_TRUE(read_model_config(files, "model").is<Value::None>());
  EXPECT_EQ(model_config_digest(files, "model"), "");
  files["hf_quant_config.json"] = R"({"quantization": {"quant_algo": "NVFP4"}})";
  EXPECT_NE(read_model_config(files, "model").find("hf_quant_config.json"), nullptr);
  const std::string digest = model_config_digest(files, "model");
  EXPECT_NE(digest, "");
  files["config.json"] = R"({"model_type": "llama"})";
  EXPECT_NE(read_model_config(files, "model").find("hf_quant_config.json"), nullptr);
  EXPECT_NE(read_model_config(files, "model").find("model_type"), nullptr);
  EXPECT_NE(model_config_digest(files, "model"), digest);
}

}  // namespace
}  // namespace tessera::arithmetic
