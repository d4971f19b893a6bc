package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/plan/model"
)

// named are the models that the requirements name.
var named = []string{
	"llama-3-70b", "mixtral-8x22b", "deepseek-v3", "qwen3-235b-a22b", "jamba-1.5-large", "nemotron-h-56b", "nemotron-3-nano-30b-a3b",
}

func preset(t testing.TB, name string) *model.Model {
	t.Helper()
	m, err := model.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func onePrefetch() PoolOptions {
	return PoolOptions{Prefetch: 1, DP: 8, TP: 1, EP: 1, ETP: 1, Gradients: PoolTypes[0]}
}

// SPEC S2.6, S2.7: on dense, MoE and hybrid models the recorded pool is within 2 %
// of the lower bound, and neither it nor the arena is larger than the max-pool.
func TestPoolsOfNamedModels(t *testing.T) {
	var models []*model.Model
	for _, name := range named {
		models = append(models, preset(t, name))
	}
	for what, change := range map[string]func(*PoolOptions){
		"plain":       func(*PoolOptions) {},
		"EP 8":        func(o *PoolOptions) { o.EP = 8 },
		"TP 4, EP 8":  func(o *PoolOptions) { o.TP, o.ETP, o.EP = 4, 1, 8 },
		"fp8, fp32":   func(o *PoolOptions) { o.FP8, o.Gradients, o.EP = true, PoolTypes[1], 8 },
		"recompute 4": func(o *PoolOptions) { o.Recompute = 4 },
		"dynamic":     func(o *PoolOptions) { o.Fallback = bucket.DynamicMemory },
	} {
		o := onePrefetch()
		change(&o)
		r, err := ComparePools(models, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range r.Models {
			for side, s := range map[string]PoolSide{"weights": m.Weights, "gradients": m.Gradients} {
				bytes := map[string]PoolFigures{}
				for _, p := range s.Pools {
					bytes[p.Pool] = p
				}
				if w := bytes["recorded"].Waste; w > 0.02 {
					t.Errorf("%s, %s of %s: trace is %.1f %% over the lower bound", what, side, m.Model, 100*w)
				}
				if bytes["arena"].Bytes > bytes["max"].Bytes || bytes["recorded"].Bytes > bytes["arena"].Bytes {
					t.Errorf("%s, %s of %s: recorded %v, arena %v, max %v", what, side, m.Model, bytes["recorded"].Bytes, bytes["arena"].Bytes, bytes["max"].Bytes)
				}
			}
		}
	}
}

// SPEC S2.7: further ahead the same holds for models whose layers are of one kind or two.
// If small and large layers alternate, as in hybrids, no pool can meet the lower bound, but
// the recorded pool is still far smaller than the max-pool.
func TestPoolsFurtherAhead(t *testing.T) {
	for i, name := range named {
		for _, prefetch := range []int{2, 3} {
			o := onePrefetch()
			o.Prefetch, o.EP, o.FP8 = prefetch, 8, true
			r, err := ComparePools([]*model.Model{preset(t, name)}, o)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range []PoolSide{r.Models[0].Weights, r.Models[0].Gradients} {
				most, recorded := s.Pools[bucket.Max], s.Pools[bucket.Recorded]
				if i < 4 && recorded.Waste > 0.02 || recorded.Waste > 0.15 || recorded.Bytes > most.Bytes*9/10 {
					t.Errorf("%s with prefetch %d: recorded is %.1f %% over the lower bound, max %.1f %%", name, prefetch, 100*recorded.Waste, 100*most.Waste)
				}
			}
		}
	}
	// Each use of a layer may have a place of its own.
	o := onePrefetch()
	o.Prefetch, o.Recompute = 2, 3
	s, err := o.Weights(preset(t, "nemotron-3-super-120b-a12b"))
	if err != nil {
		t.Fatal(err)
	}
	if p, err := bucket.NewPoolPlan(bucket.Recorded, s, bucket.Options{}); err != nil || p.Waste() > 0.05 || len(p.Moves) == 0 {
		t.Errorf("%v; recomputed: %.1f %% over the lower bound", err, 100*p.Waste())
	}
}

// steps returns an order in words: a name begins a use, and a full stop ends it.
func steps(s bucket.Spec) string {
	var words []string
	for _, e := range s.Order {
		name := strings.ReplaceAll(s.Units[e.Unit].Name, " ", "_")
		if e.Release {
			name = "."
		}
		words = append(words, name)
	}
	return strings.Join(words, " ")
}

// tiedModel returns a model of three layers, tied, with two depths of MTP.
func tiedModel() *model.Model {
	dense := model.Layer{Attention: &model.Attention{Heads: 2, KVHeads: 1, HeadDim: 4}, Dense: &model.Dense{Width: 16, Gated: true}}
	moe := model.Layer{Attention: dense.Attention, MoE: &model.MoE{Experts: 4, TopK: 2, Width: 6}}
	return &model.Model{
		Name: "small", Hidden: 8, Vocab: 10, Tied: true, Layers: []model.Layer{dense, moe, moe},
		MTP: &model.MTP{Depth: 2, Layers: []model.Layer{moe}},
	}
}

// SPEC S2.4, S2.6: MTP uses the tied embedding inside of its projection, which
// surrounds its layers; none of these is a unit.
func TestPoolOrders(t *testing.T) {
	o := onePrefetch()
	w, err := o.Weights(tiedModel())
	if err != nil {
		t.Fatal(err)
	}
	want := "embedding . layer_0 . layer_1 . layer_2 . mtp_0 embedding . mtp_0,_layer_0 . . mtp_1 embedding . mtp_1,_layer_0 . . final_norm . embedding . " +
		"mtp_1 mtp_1,_layer_0 . . mtp_0 mtp_0,_layer_0 . . layer_2 . layer_1 . layer_0 ."
	if got := steps(w); got != want {
		t.Errorf("weights\n got %s\nwant %s", got, want)
	}
	g, err := o.Grads(tiedModel())
	if err != nil {
		t.Fatal(err)
	}
	want = "embedding . final_norm . mtp_1 mtp_1,_layer_0 . embedding . . mtp_0 mtp_0,_layer_0 . embedding . . layer_2 . layer_1 . layer_0 . embedding ."
	if got := steps(g); got != want || g.Prefetch != 0 || g.Behind != 1 {
		t.Errorf("gradients\n got %s\nwant %s", got, want)
	}
	for _, u := range w.Units {
		if layer := strings.Contains(u.Name, "layer"); layer == u.Loose {
			t.Errorf("unit %q is loose: %v", u.Name, u.Loose)
		}
	}

	m := tiedModel()
	m.Tied, m.MTP.Repeated, o.Recompute = false, true, 2
	if w, err = o.Weights(m); err != nil {
		t.Fatal(err)
	}
	want = "embedding . layer_0 . layer_1 . layer_2 . mtp_0 embedding . mtp_0,_layer_0 . . mtp_0 embedding . mtp_0,_layer_0 . . final_norm . output_layer . " +
		"mtp_0 mtp_0,_layer_0 . . mtp_0 mtp_0,_layer_0 . . layer_2 . layer_0 . layer_1 . layer_1 . layer_0 ."
	if got := steps(w); got != want {
		t.Errorf("recomputed\n got %s\nwant %s", got, want)
	}
}

// A layer of Llama-3-70B has (64+2*8)*128*8192 + 8192*8192 + 3*28672*8192 +
// 2*8192 parameters. One of Mixtral has 8*3*16384*6144 in its experts; over 4
// ranks of EP and 2 of ETP an eighth of that is left.
func TestPoolBuckets(t *testing.T) {
	w, err := onePrefetch().Weights(preset(t, "llama-3-70b"))
	if err != nil {
		t.Fatal(err)
	}
	if got := w.Units[1].Buckets; len(got) != 1 || got[0].Elements != 855_654_400 || got[0].Type != PoolTypes[0] {
		t.Errorf("layer 0 of Llama has %+v", got)
	}
	if w.Multiple != 8*8 || w.Align != 256 {
		t.Errorf("buckets are padded to %d elements and %d bytes", w.Multiple, w.Align)
	}
	o := onePrefetch()
	o.EP, o.ETP, o.TP = 4, 2, 2
	if w, err = o.Weights(preset(t, "mixtral-8x22b")); err != nil {
		t.Fatal(err)
	}
	attention := int64((48+2*8)*128*6144 + 6144*6144)
	want := []bucket.Bucket{
		{Name: "dense", Type: PoolTypes[0], Elements: attention/2 + 2*6144 + 8*6144},
		{Name: "experts", Type: PoolTypes[0], Elements: 3 * 16384 * 6144},
	}
	if got := w.Units[1].Buckets; !reflect.DeepEqual(got, want) {
		t.Errorf("layer 0 of Mixtral has\n%+v, want\n%+v", got, want)
	}
	// Norms and the router are not gathered in fp8.
	o.FP8 = true
	if w, err = o.Weights(preset(t, "mixtral-8x22b")); err != nil {
		t.Fatal(err)
	}
	want = []bucket.Bucket{
		{Name: "dense", Type: PoolTypes[0], Elements: 2*6144 + 8*6144},
		{Name: "dense fp8", Type: PoolTypes[2], Elements: attention / 2},
		{Name: "experts fp8", Type: PoolTypes[2], Elements: 3 * 16384 * 6144},
	}
	if got := w.Units[1].Buckets; !reflect.DeepEqual(got, want) {
		t.Errorf("in fp8 it has\n%+v, want\n%+v", got, want)
	}
	// SPEC S2.5: the data type on the wire is that of the gradients' pool.
	o.Gradients = PoolTypes[1]
	g, err := o.Grads(preset(t, "mixtral-8x22b"))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range g.Units[1].Buckets {
		if b.Type != PoolTypes[1] {
			t.Errorf("gradients of %s are in %s", b.Name, b.Type.Name)
		}
	}
	o.EP = 3
	if _, err := ComparePools([]*model.Model{preset(t, "mixtral-8x22b")}, o); err == nil || !strings.Contains(err.Error(), "EP 3 does not divide 8 experts; choose one that does") {
		t.Errorf("got %v", err)
	}
}

// The chart is well-formed, names everything, and cuts bars that are too long.
func TestPoolsSVG(t *testing.T) {
	m := tiedModel()
	m.Name = `a <&"> model`
	r, err := ComparePools([]*model.Model{m, preset(t, "nemotron-h-56b")}, onePrefetch())
	if err != nil {
		t.Fatal(err)
	}
	chart := PoolsSVG(r)
	d := xml.NewDecoder(bytes.NewReader(chart))
	var text []string
	count := map[string]int{}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch x := token.(type) {
		case xml.StartElement:
			count[x.Name.Local]++
		case xml.CharData:
			text = append(text, string(x))
		}
	}
	// A background, and six bars on two sides for two models; one line each for
	// the axis and the bound.
	if count["rect"] != 1+6*2*2 || count["line"] != 2*2*2 || count["path"] == 0 {
		t.Errorf("the chart has %v", count)
	}
	all := strings.Join(text, "\n")
	for _, want := range []string{m.Name, "nemotron-h-56b", "weights", "gradients in bf16", "recorded", fmt.Sprint(r.Models[1].Weights.Lower)} {
		if !strings.Contains(all, want) {
			t.Errorf("the chart does not say %s", want)
		}
	}
	if bytes.Contains(chart, []byte("href")) || !bytes.Contains(chart, []byte("prefers-color-scheme: dark")) {
		t.Error("the chart must stand alone and have a dark scheme")
	}
}

// All figures of a comparison of unlike models and options. A change of any is seen; write
// it anew with -update if the change is meant.
func TestPoolsTable(t *testing.T) {
	var b strings.Builder
	for _, o := range []PoolOptions{
		{Prefetch: 2, DP: 3, TP: 2, EP: 2, ETP: 1, Gradients: PoolTypes[1]},
		{Prefetch: 1, DP: 8, TP: 1, EP: 4, ETP: 2, Gradients: PoolTypes[0], FP8: true, Recompute: 2, Fallback: bucket.DynamicMemory},
	} {
		r, err := ComparePools([]*model.Model{preset(t, "tiny-deepseek"), preset(t, "jamba-1.5-large")}, o)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.MarshalIndent(r, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		b.Write(append(text, '\n'))
	}
	golden.Check(t, "pools.json", b.String())
}
