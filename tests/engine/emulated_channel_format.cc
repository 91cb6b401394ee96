// SPDX-License-Identifier: Apache-2.0
// Channel rows in device memory, their source run on the host.
#include "store/rows/channel/device_channel_rows.cu"
