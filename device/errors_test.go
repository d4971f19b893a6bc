// This file owns the words of the typed errors: users read them, so they are
// held fixed letter by letter.

package device_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

func TestErrorTexts(t *testing.T) {
	oom := func(owners ...device.OwnerUsage) error {
		return &device.OutOfMemory{
			Device: "cuda:0", Kind: memory.Device, Owner: "stash", Asked: 3 * memory.GiB,
			Free: 512 * memory.MiB, Capacity: 8 * memory.GiB, Owners: owners,
		}
	}
	held := func(owner string, n memory.Bytes) device.OwnerUsage {
		return device.OwnerUsage{Owner: owner, Current: n, Peak: 2 * n}
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{oom(), `cuda:0: out of device memory: "stash" asked for 3.00 GiB, but only 512.00 MiB of 8.00 GiB are free`},
		{
			oom(held("weights", 7*memory.GiB), held("stash", 512*memory.MiB)),
			`cuda:0: out of device memory: "stash" asked for 3.00 GiB, but only 512.00 MiB of 8.00 GiB are free; held by "weights" 7.00 GiB, "stash" 512.00 MiB; free some of it or ask for less`,
		},
		{ // four holders are named, the rest is counted
			oom(held("a", 6), held("b", 5), held("c", 4), held("d", 3), held("e", 2), held("f", 1)),
			`cuda:0: out of device memory: "stash" asked for 3.00 GiB, but only 512.00 MiB of 8.00 GiB are free; held by "a" 6 B, "b" 5 B, "c" 4 B, "d" 3 B and 2 more; free some of it or ask for less`,
		},
		{ // a wait would help
			&device.OutOfMemory{
				Device: "cpu:0", Kind: memory.Host, Owner: "cache", Asked: 2 * memory.MiB, Capacity: 3 * memory.MiB,
				Pending: memory.MiB, Owners: []device.OwnerUsage{held("cache", 3*memory.MiB)},
			},
			`cpu:0: out of host memory: "cache" asked for 2.00 MiB, but only 0 B of 3.00 MiB are free; held by "cache" 3.00 MiB, of which 1.00 MiB are freed and wait for their stream; synchronise and try again`,
		},
		{
			&device.DriverError{Device: "cuda:0", Call: "cuStreamSynchronize", Code: 700, Text: "an illegal memory access was encountered"},
			"cuda:0: cuStreamSynchronize failed with error 700: an illegal memory access was encountered; restart the process",
		},
		{
			&device.DriverError{Device: "cpu:0", Call: "kernel copy", Text: "index out of range"},
			"cpu:0: kernel copy failed: index out of range; close the device and open it again",
		},
		{
			&device.Unsupported{What: "CUDA device", Why: "libcuda.so.1 was not found", Need: "install the NVIDIA driver, version 535 or later"},
			"CUDA device not available: libcuda.so.1 was not found; install the NVIDIA driver, version 535 or later",
		},
		{
			&device.CaptureError{Stream: "compute", Why: `stream "copy" was not joined`, Do: "wait for its last event first"},
			`capture on stream "compute": stream "copy" was not joined; wait for its last event first`,
		},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("%T says\n %s\nwant\n %s", c.err, got, c.want)
		}
	}
}
