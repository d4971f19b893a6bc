// This file owns tests of what forecasts and comparisons compute from the ranks' figures.

package run

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train"
)

// The budgets that are tried begin with the share of what keeping everything takes and
// rise. Beside what is not activations, they leave the share of the rest, and at last more
// than all of it.
func TestBudgetsToTry(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		var ranks []heldBy
		var most, fixed memory.Bytes
		for range 1 + r.IntN(4) {
			peak := memory.Bytes(1000 + r.IntN(1_000_000))
			heap := memory.Bytes(r.Int64N(int64(peak))) * memory.Bytes(min(1, r.IntN(5))) // some have none
			ranks = append(ranks, heldBy{peak, []device.OwnerUsage{
				{Owner: trace.HeapOwner(memory.Device), Kind: memory.Device, Peak: heap},
				{Owner: trace.HeapOwner(memory.Device), Kind: memory.Host, Peak: peak}, // of another kind of memory
				{Owner: "parameters", Kind: memory.Device, Peak: peak - heap},
			}})
			most, fixed = max(most, peak), max(fixed, peak-heap)
		}
		share := 0.3 + 0.6*r.Float64()
		out := budgetsToTry(share, ranks)
		if out[0] != memory.Bytes(share*float64(most)) || out[len(out)-1] != fixed+4*(most-fixed) && most > fixed {
			t.Fatalf("a share of %g of %d, of which %d stay: %d", share, most, fixed, out)
		}
		for i := 1; i < len(out); i++ {
			if out[i] <= out[i-1] {
				t.Fatalf("budgets do not rise: %d", out)
			}
		}
		if b := fixed + memory.Bytes(share*float64(most-fixed)); len(out) != 6 && b > out[0] && most > fixed+10 {
			t.Fatalf("%d budgets where all of them rise: %d", len(out), out)
		}
	}
}

// Both kinds of memory of an owner come together, under its name without the rank, and the
// peaks are those of the fullest ranks.
func TestOwnersOfAForecast(t *testing.T) {
	of := func(rank int, dev, host memory.Bytes, owners ...device.OwnerUsage) train.RankForecast {
		return train.RankForecast{Rank: rank, Device: dev, Host: host, Owners: owners}
	}
	one := of(1, 70, 9,
		device.OwnerUsage{Owner: "rank 1 gradients", Kind: memory.Device, Peak: 40, Current: 3},
		device.OwnerUsage{Owner: "parameters", Kind: memory.Device, Peak: 30},
		device.OwnerUsage{Owner: "rank 1 gradients", Kind: memory.Host, Peak: 5})
	want := []Owner{{Owner: "gradients", Device: 40, Host: 5}, {Owner: "parameters", Device: 30}}
	if got := owners(one); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if dev, host := highest(train.RunForecast{Ranks: []train.RankForecast{of(0, 50, 12), one, of(2, 60, 3)}}); dev != 70 || host != 12 {
		t.Errorf("%d and %d bytes", dev, host)
	}
}
