#include "formats/deepspeed/family.h"

#include "formats/drivers.h"

namespace tessera::formats::deepspeed {

const torch_files::Family& family() {
  static const torch_files::Family kFamily{
      .format = deepspeed_driver().format(),
      .records = {"deepspeed.utils.tensor_fragment.fragment_address",
                  "deepspeed.runtime.fp16.loss_scaler.LossScaler",
                  "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                  "deepspeed.checkpoint.universal_checkpoint.SubparamShape"},
      .own_names = {"deepspeed."},
      .check = require_own_name,
      .keeps_key_order = true};
  return kFamily;
}

}  // namespace tessera::formats::deepspeed
