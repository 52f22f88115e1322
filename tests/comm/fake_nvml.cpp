// An NVML that says what the file named by $FAKE_NVML says: one fact a line, read by nvmlInit_v2.
//   driver VERSION
//   gpu UUID BUS_ID GEN WIDTH MAX_GEN MAX_WIDTH GPU_MAX_GEN PSTATE MIG NAME...
//   label I J LEVEL | p2p KIND I J STATE
//   fail FUNCTION CODE [DEVICE]     the call fails (for one device only)
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

struct Device {
  int index;
  std::string uuid, bus_id, name;
  unsigned gen, width, max_gen, max_width, gpu_max_gen, pstate, mig;
};

struct PciInfo {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};

std::string driver;
std::vector<Device> devices;
std::map<std::pair<int, int>, unsigned> labels;
std::map<std::tuple<int, int, int>, unsigned> p2p;
std::map<std::pair<std::string, int>, int> failures;

int Failure(const char* function, int device = -1) {
  for (int who : {device, -1}) {
    auto found = failures.find({function, who});
    if (found != failures.end()) return found->second;
  }
  return 0;
}

int Text(const char* function, int device, const std::string& text, char* out, unsigned size) {
  if (int code = Failure(function, device)) return code;
  if (text.size() + 1 > size) return 7;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return 0;
}

int Number(const char* function, const Device* device, unsigned value, unsigned* out) {
  if (int code = Failure(function, device->index)) return code;
  *out = value;
  return 0;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  driver = "580.82.07";
  devices.clear();
  labels.clear();
  p2p.clear();
  failures.clear();
  const char* path = std::getenv("FAKE_NVML");
  std::ifstream file(path ? path : "");
  for (std::string line, word; std::getline(file, line);) {
    std::istringstream in(line);
    in >> word;
    if (word == "driver") {
      in >> driver;
    } else if (word == "gpu") {
      Device d;
      in >> d.uuid >> d.bus_id >> d.gen >> d.width >> d.max_gen >> d.max_width >> d.gpu_max_gen >>
          d.pstate >> d.mig;
      std::getline(in >> std::ws, d.name);
      d.index = static_cast<int>(devices.size());
      devices.push_back(d);
    } else if (word == "label") {
      int i, j;
      in >> i >> j;
      in >> labels[{i, j}];
    } else if (word == "p2p") {
      int kind, i, j;
      in >> kind >> i >> j;
      in >> p2p[{kind, i, j}];
    } else if (word == "fail") {
      std::string function;
      int code = 0, device = -1;
      in >> function >> code;
      if (!(in >> device)) device = -1;
      failures[{function, device}] = code;
    }
  }
  return Failure("nvmlInit_v2");
}

int nvmlShutdown() { return Failure("nvmlShutdown"); }

const char* nvmlErrorString(int code) {
  switch (code) {
    case 3:
      return "Not Supported";
    case 9:
      return "Driver Not Loaded";
    case 15:
      return "GPU is lost";
    default:
      return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return Text("nvmlSystemGetDriverVersion", -1, driver, out, size);
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(devices.size());
  return Failure("nvmlDeviceGetCount_v2");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** device) {
  if (index >= devices.size()) return 2;
  *device = &devices[index];
  return Failure("nvmlDeviceGetHandleByIndex_v2", static_cast<int>(index));
}

int nvmlDeviceGetPciInfo_v3(Device* device, PciInfo* info) {
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->bus_id, sizeof info->bus_id, "%s", device->bus_id.c_str());
  return Failure("nvmlDeviceGetPciInfo_v3", device->index);
}

int nvmlDeviceGetUUID(Device* device, char* out, unsigned size) {
  return Text("nvmlDeviceGetUUID", device->index, device->uuid, out, size);
}

int nvmlDeviceGetName(Device* device, char* out, unsigned size) {
  return Text("nvmlDeviceGetName", device->index, device->name, out, size);
}

int nvmlDeviceGetCurrPcieLinkGeneration(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetCurrPcieLinkGeneration", device, device->gen, out);
}

int nvmlDeviceGetCurrPcieLinkWidth(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetCurrPcieLinkWidth", device, device->width, out);
}

int nvmlDeviceGetMaxPcieLinkGeneration(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetMaxPcieLinkGeneration", device, device->max_gen, out);
}

int nvmlDeviceGetMaxPcieLinkWidth(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetMaxPcieLinkWidth", device, device->max_width, out);
}

#ifndef OLD_NVML
int nvmlDeviceGetGpuMaxPcieLinkGeneration(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetGpuMaxPcieLinkGeneration", device, device->gpu_max_gen, out);
}

int nvmlDeviceGetMigMode(Device* device, unsigned* current, unsigned* pending) {
  *current = *pending = device->mig;
  return Failure("nvmlDeviceGetMigMode", device->index);
}
#endif

int nvmlDeviceGetPerformanceState(Device* device, unsigned* out) {
  return Number("nvmlDeviceGetPerformanceState", device, device->pstate, out);
}

int nvmlDeviceGetTopologyCommonAncestor(Device* a, Device* b, unsigned* out) {
  auto found = labels.find({a->index, b->index});
  if (found == labels.end()) return 3;
  return Number("nvmlDeviceGetTopologyCommonAncestor", a, found->second, out);
}

int nvmlDeviceGetP2PStatus(Device* a, Device* b, int kind, unsigned* out) {
  auto found = p2p.find({kind, a->index, b->index});
  return Number("nvmlDeviceGetP2PStatus", a, found == p2p.end() ? 0 : found->second, out);
}

}  // extern "C"
