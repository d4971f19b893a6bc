// This file owns the tests of limits: memory is as large as the smaller of the device's and the limit.

package check_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// The capacity is the smaller of the device's and the limit. The last byte is given, and none beyond it, and the error has
// the figures of that moment: those who hold memory of the kind, the largest first.
func TestCapacityIsTheSmaller(t *testing.T) {
	const room = 1 << 20
	for _, limit := range []memory.Bytes{0, room / 2, room, 2 * room} {
		for _, s := range schedules {
			inner, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{room, room}})
			if err != nil {
				t.Fatal(err)
			}
			d := check.New(check.Options{Schedule: s, Limits: [memory.Kinds]memory.Bytes{memory.Device: limit}}).Wrap(inner)
			most := memory.Bytes(room)
			if limit > 0 {
				most = min(most, limit)
			}
			holds := func(when string, n memory.Bytes) {
				t.Helper()
				u := d.Memory().Kind[memory.Device]
				if d.Info().Capacity[memory.Device] != most || u.Capacity != most || u.Current != n || u.Pending != 0 {
					t.Errorf("limit %v, %s: %+v of %v", limit, when, u, d.Info().Capacity)
				}
			}
			holds("at first", 0)
			var bufs []*device.Buffer
			for i, n := range []memory.Bytes{most / 4, most / 2, most / 4} {
				b, err := d.Alloc(memory.Device, n, fmt.Sprint("owner ", i))
				if err != nil {
					t.Fatalf("limit %v: %v", limit, err)
				}
				bufs = append(bufs, b)
			}
			host, err := d.Alloc(memory.Host, 4096, "host")
			if err != nil {
				t.Fatal(err)
			}
			holds("full", most)
			var full *device.OutOfMemory
			if _, err := d.Alloc(memory.Device, 1, "more"); !errors.As(err, &full) {
				t.Fatalf("limit %v: one byte more: %v", limit, err)
			}
			var owners []string
			for _, o := range full.Owners {
				owners = append(owners, o.Owner)
			}
			if full.Free != 0 || full.Capacity != most || full.Asked != 1 || full.Owner != "more" || full.Pending != 0 || !slices.Equal(owners, []string{"owner 1", "owner 0", "owner 2"}) {
				t.Errorf("limit %v: %+v", limit, full)
			}
			stream, err := d.NewStream("s")
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range append(bufs, host) {
				stream.Free(b)
			}
			if err := stream.Sync(); err != nil {
				t.Fatal(err)
			}
			holds("empty again", 0)
			if b, err := d.Alloc(memory.Device, most, "all"); err != nil {
				t.Errorf("limit %v: all of it: %v", limit, err)
			} else {
				stream.Free(b)
			}
			if err := errors.Join(stream.Close(), d.Close()); err != nil {
				t.Error(err)
			}
		}
	}
}
