// Package hardware has what the planner must know of accelerators: memory,
// arithmetic speed by number format, and the bandwidth of their links. The
// figures are data files beside this one, with their sources.
package hardware

// GPU is one accelerator and the links it has.
type GPU struct {
	Name string `json:"name"` // "h100"
	// Memory is what the device has, Usable what a framework's allocator can
	// have of it after context, communication buffers and handles.
	Memory int64 `json:"memory_bytes"`
	Usable int64 `json:"usable_bytes"`
	// Flops are dense peak operations a second by format: "bf16", "fp8", "mxfp8",
	// "nvfp4".
	Flops map[string]float64 `json:"flops"`
	// HBM, the two directions of the host link, the fast links between GPUs and
	// the network, in bytes a second for one GPU.
	HBM       float64 `json:"hbm"`
	HostOut   float64 `json:"host_out"`
	HostIn    float64 `json:"host_in"`
	HostBoth  float64 `json:"host_both"` // sum of both directions at once
	FastLink  float64 `json:"fast_link"`
	FastGroup int     `json:"fast_group"` // GPUs that reach each other over it
	Network   float64 `json:"network"`
	// Generation is the compute capability's major number; zero if it is no
	// NVIDIA GPU.
	Generation int    `json:"generation"`
	Source     string `json:"source"`
}
